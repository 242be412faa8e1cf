"""The Python module keeps to Python's stable ABI of 3.12, in which one wheel serves all later Pythons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "native" / "python"
_QUESTION = "import sys, sysconfig; assert sys.version_info >= (3, 12); print(sysconfig.get_path('include'))"


def headers() -> Path | None:
    """Of a Python that knows the stable ABI of 3.12."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python3.{minor}") for minor in range(12, 16)]
    for python in (*filter(None, found), *sorted(versions.glob("3.1*/bin/python"))):
        done = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, check=False)
        if done.returncode == 0 and (folder := Path(done.stdout.strip())).joinpath("Python.h").exists():
            return folder
    return None


def compile_as_stable(source: Path) -> str:
    """What the compiler has against it."""
    nanobind = pytest.importorskip("nanobind")
    compiler, python = shutil.which("g++"), headers()
    if compiler is None or python is None:
        pytest.skip("needs g++ and the headers of Python 3.12 or newer")
    folders = [ROOT / "native", ROOT / "native" / "include", FOLDER]
    others = [python, nanobind.include_dir(), numpy.get_include()]
    command = [
        compiler, "-std=gnu++20", "-fvisibility=hidden", "-fsyntax-only", "-DPy_LIMITED_API=0x030C0000", "-Wall", "-Wextra", "-Werror",
        *(f"-I{folder}" for folder in folders), *(f"-isystem{folder}" for folder in others), str(source),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.slow
def test_the_sources_compile(tmp_path: Path) -> None:
    # Grouped as builds group them, which is quicker.
    command = [sys.executable, str(ROOT / "cmake" / "unity.py"), str(tmp_path), "14", *map(str, FOLDER.glob("*.cpp"))]
    groups = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace(";", "\n").split()
    assert groups
    for group in groups:
        assert compile_as_stable(Path(group)) == ""


def test_what_is_not_in_it_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "macro.cpp"
    source.write_text("#include <Python.h>\nPy_ssize_t size(PyObject* tuple) { return PyTuple_GET_SIZE(tuple); }\n")
    assert "PyTuple_GET_SIZE" in compile_as_stable(source)
