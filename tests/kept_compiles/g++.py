"""g++ for the tests: what export keeps between compiles, also where torch's own packager calls the compiler.

UNTORCH_TEST_CXX: the real compiler. UNTORCH_HEADERS, UNTORCH_CACHE: the folders of precompiled headers and of objects.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

# Without the packages' own code, which imports PyTorch: that takes longer than the compile.
for name in ("untorch", "untorch.export"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(Path(__file__).resolve().parents[2] / "src" / name.replace(".", "/"))]

from untorch.export.precompiled_headers import with_precompiled_header  # noqa: E402
from untorch.export.runtime_interface import compile_in_parts  # noqa: E402


def main() -> None:
    """Compiles in parts, or runs the real compiler in this process's place."""
    compiler = os.environ["UNTORCH_TEST_CXX"]
    arguments = with_precompiled_header(compiler, sys.argv[1:])
    if not compile_in_parts(compiler, arguments):
        os.execv(compiler, [compiler, *arguments])


if __name__ == "__main__":
    main()
