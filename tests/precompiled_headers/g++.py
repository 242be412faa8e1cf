#!/usr/bin/env python3
"""g++ for the tests: precompiles the headers of generated code also where torch's own packager calls the compiler.

UNTORCH_TEST_CXX: the real compiler. UNTORCH_HEADERS: the folder of the precompiled headers.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# By its path: the package would import PyTorch, which takes longer than the compile.
MODULE = Path(__file__).resolve().parents[2] / "src/untorch/export/precompiled_headers.py"


def main() -> None:
    """Runs the real compiler in this process's place."""
    compiler = os.environ["UNTORCH_TEST_CXX"]
    arguments = runpy.run_path(str(MODULE))["with_precompiled_header"](compiler, sys.argv[1:])
    os.execv(compiler, [compiler, *arguments])


if __name__ == "__main__":
    main()
