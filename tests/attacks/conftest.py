"""A small package made without PyTorch, and a process to open damaged copies of it in."""

from __future__ import annotations

import pathlib
import platform
import sys
from collections.abc import Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import craft  # noqa: E402
import probe  # noqa: E402
from compiler import compile_library  # noqa: E402


def model_library(directory_of_target: pathlib.Path, *flags: str) -> bytes:
    """The library that model.c makes, bound to libuntorch.so."""
    import untorch._core

    directory = pathlib.Path(untorch._core.__file__).resolve().parent
    candidates = [directory, directory.parent, pathlib.Path(untorch.__file__).resolve().parent]
    folder = next(path for path in candidates if (path / "libuntorch.so").exists())
    target = directory_of_target / "model.so"
    return compile_library(HERE / "model.c", target, f"-L{folder}", "-luntorch", "-Wl,--allow-shlib-undefined", *flags)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """y = 2 * x + w."""
    return model_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def weight_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """y = w itself."""
    return model_library(tmp_path_factory.mktemp("weight_library"), "-DRETURN_WEIGHT")


@pytest.fixture
def package(library: bytes) -> craft.Package:
    """A true package around it."""
    return craft.Package(library, craft.manifest(platform.machine()))


@pytest.fixture(scope="session")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[probe.Prober]:
    """A process that opens files."""
    with probe.Prober(tmp_path_factory.mktemp("probe")) as running:
        yield running
