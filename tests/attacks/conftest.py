"""A small package made without PyTorch, and a process to open damaged copies of it in."""

from __future__ import annotations

import pathlib
import platform
import sys
from collections.abc import Callable, Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import craft  # noqa: E402
import kernel_packages  # noqa: E402
import probe  # noqa: E402
from compiler import model_library  # noqa: E402

from tests.packages import compiled  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what AddressSanitizer's run is enough for."""
    for item in items:
        if HERE in item.path.parents and not {"unsanitized", "of_each_build"} & {
            mark.name for mark in item.iter_markers()
        }:
            item.add_marker(pytest.mark.sanitized)


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
def real_package() -> craft.RealPackage:
    """A package with a library that AOTInductor made."""
    return craft.RealPackage.read(compiled(HERE / "models.py", "own"))


@pytest.fixture(scope="session")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[probe.Prober]:
    """A process that opens files."""
    with probe.Prober(tmp_path_factory.mktemp("probe")) as running:
        yield running


@pytest.fixture(scope="session")
def compiled_values() -> Callable[[str, str], pathlib.Path]:
    """The package of value_models.py by maker ("own", "stock") and sizes."""
    return lambda maker, sizes: compiled(HERE / "value_models.py", f"{maker}_{sizes}")


@pytest.fixture(scope="session")
def kernel_package() -> pathlib.Path:
    """Made by untorch.export: clip, twice, parts and counted call operators of our own; long computes."""
    return kernel_packages.compiled("own")


@pytest.fixture(scope="session")
def stock_kernel_package() -> pathlib.Path:
    """Made by PyTorch: clip."""
    return kernel_packages.compiled("stock")
