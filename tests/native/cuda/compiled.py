"""Compiles programs that print what a kernel header's heuristics choose. Needs a C++ compiler and no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.shim import ROOT


def compiled(source: str, folder: Path) -> Path:
    """The program of a C++ source, in ``folder``."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    file, program = folder / "program.cpp", folder / "program"
    file.write_text(source)
    subprocess.run([compiler, "-std=c++20", f"-I{ROOT / 'native'}", str(file), "-o", str(program)], check=True)
    return program


def lines_of(source: str, folder: Path) -> list[str]:
    """What it prints."""
    done = subprocess.run([compiled(source, folder)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
