"""Compiles the C sources of these tests."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest


def compile_library(source: pathlib.Path, target: pathlib.Path, *flags: str) -> bytes:
    """Compiles C to a shared library; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(target), *flags], check=True)
    return target.read_bytes()
