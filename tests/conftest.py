"""What all tests share: a compiler that precompiles the headers of generated code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILER = HERE / "precompiled_headers" / "g++.py"


def use_precompiled_headers() -> None:
    """For this process and those that it starts. A CXX of the caller's stays."""
    compiler = shutil.which("g++")
    if "CXX" in os.environ or compiler is None:
        return
    os.environ |= {
        "CXX": str(COMPILER),
        "UNTORCH_TEST_CXX": compiler,
        "UNTORCH_HEADERS": str(HERE.parent / "build" / "test-cache" / "headers"),
    }


use_precompiled_headers()
