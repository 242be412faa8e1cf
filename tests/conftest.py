"""What all tests share: a compiler that keeps what generated code has in common, and fewer examples on request."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "build" / "test-cache"
# Python for sources of generated code alone: an export has eight commands, most of which take less time than its start.
_COMPILER = """#!/bin/sh
case " $* " in
  *".wrapper.cpp "*) exec {python} "$@" ;;
  *" -include "*) ;;
  *".kernel.cpp "*) exec {python} "$@" ;;
esac
exec {compiler} "$@"
"""


def keep_compiles() -> None:
    """For this process and those that it starts. A CXX of the caller's stays."""
    compiler = shutil.which("g++")
    if "CXX" in os.environ or compiler is None:
        return
    # This very interpreter, and nothing of its environment: finding another takes longer than some compiles.
    words = [sys.executable, "-I", "-S", str(HERE / "kept_compiles" / "g++.py")]
    KEPT.mkdir(parents=True, exist_ok=True)
    script, text = KEPT / "g++", _COMPILER.format(python=shlex.join(words), compiler=shlex.quote(compiler))
    # A file that stays keeps its time, by which headers and objects of earlier runs are found.
    if not script.is_file() or script.read_text() != text:
        part = KEPT / f"g++.{os.getpid()}"
        part.write_text(text)
        part.chmod(0o755)
        part.replace(script)
    os.environ |= {
        "CXX": str(script),
        "UNTORCH_TEST_CXX": compiler,
        "UNTORCH_HEADERS": str(KEPT / "headers"),
        "UNTORCH_CACHE": str(KEPT / "objects"),
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Draws one of ``UNTORCH_FEWER_EXAMPLES`` examples of each property that another run draws all of."""
    divisor = int(os.environ.get("UNTORCH_FEWER_EXAMPLES", "1"))
    if divisor == 1:
        return
    from hypothesis import settings

    for test in {
        item.obj
        for item in items
        if hasattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings")
        and item.get_closest_marker("sanitized") is None
    }:
        given = test._hypothesis_internal_use_settings
        fewer = max(given.max_examples // divisor, 10)
        test._hypothesis_internal_use_settings = settings(given, max_examples=min(fewer, given.max_examples))


keep_compiles()
# torch.compile starts processes for Triton's kernels beforehand, which take as long as some tests: with the first kernel.
os.environ.setdefault("TORCH_WARM_POOL", "0")
