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


def model_library(directory_of_target: pathlib.Path, *flags: str) -> bytes:
    """The library that model.c makes, bound to libuntorch.so."""
    import untorch._core

    directory = pathlib.Path(untorch._core.__file__).resolve().parent
    candidates = [directory, directory.parent, pathlib.Path(untorch.__file__).resolve().parent]
    folder = next(path for path in candidates if (path / "libuntorch.so").exists())
    target = directory_of_target / "model.so"
    return compile_library(
        pathlib.Path(__file__).with_name("model.c"),
        target,
        f"-L{folder}",
        "-luntorch",
        "-Wl,--allow-shlib-undefined",
        *flags,
    )
