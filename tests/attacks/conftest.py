"""A small package made without PyTorch, and a process to open damaged copies of it in."""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import craft  # noqa: E402
import probe  # noqa: E402


def compile_library(source: pathlib.Path, target: pathlib.Path, *flags: str) -> bytes:
    """Compiles C to a shared library; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(target), *flags], check=True)
    return target.read_bytes()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library that model.c makes, bound to libuntorch.so."""
    import untorch._core

    directory = pathlib.Path(untorch._core.__file__).resolve().parent
    candidates = [directory, directory.parent, pathlib.Path(untorch.__file__).resolve().parent]
    folder = next(path for path in candidates if (path / "libuntorch.so").exists())
    target = tmp_path_factory.mktemp("library") / "model.so"
    return compile_library(HERE / "model.c", target, f"-L{folder}", "-luntorch", "-Wl,--allow-shlib-undefined")


@pytest.fixture
def package(library: bytes) -> craft.Package:
    """A true package around it."""
    return craft.Package(library, craft.manifest(platform.machine()))


@pytest.fixture(scope="session")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[probe.Prober]:
    """A process that opens files."""
    with probe.Prober(tmp_path_factory.mktemp("probe")) as running:
        yield running
