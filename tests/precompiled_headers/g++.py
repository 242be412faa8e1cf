#!/usr/bin/env python3
"""g++ for the tests: precompiles the headers of generated code also where torch's own packager calls the compiler.

UNTORCH_TEST_CXX: the real compiler. UNTORCH_HEADERS: the folder of the precompiled headers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

MODULE = Path(__file__).resolve().parents[2] / "src/untorch/export/precompiled_headers.py"


def load_module() -> ModuleType:
    """By its path: the package would import PyTorch, which takes longer than the compile."""
    spec = importlib.util.spec_from_file_location("precompiled_headers", MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Runs the real compiler in this process's place."""
    compiler, arguments = os.environ["UNTORCH_TEST_CXX"], sys.argv[1:]
    headers = load_module()
    sources = [item for item in arguments if headers.is_generated_source(item)]
    folder = headers.headers_folder()
    if len(sources) == 1 and "-c" in arguments and "-include" not in arguments and folder is not None:
        header = headers.precompiled_header(compiler, arguments, sources[0], folder)
        if header is not None:
            arguments = ["-include", str(header), *arguments]
    os.execv(compiler, [compiler, *arguments])


if __name__ == "__main__":
    main()
