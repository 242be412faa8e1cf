"""A small package made without PyTorch, and a process to open damaged copies of it in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
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
    """The package of value_models.py by maker ("own", "stock") and sizes; kept under build/test-cache."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs PyTorch to compile the test's model")
    root = HERE.parents[1]
    sources = [HERE / "value_models.py", *sorted((root / "src/untorch/export").rglob("*.py"))]
    key = hashlib.blake2b(digest_size=8)
    for part in (torch, *(source.read_text() for source in sources)):
        key.update(part.encode())

    def compiled(maker: str, sizes: str) -> pathlib.Path:
        path = root / "build" / "test-cache" / key.hexdigest() / f"values_{maker}_{sizes}.pt2"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"part{os.getpid()}_{path.name}")
            command = [sys.executable, str(HERE / "value_models.py"), maker, sizes, str(part)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            part.replace(path)
        return path

    return compiled


@pytest.fixture(scope="session")
def kernel_package() -> pathlib.Path:
    """Made by untorch.export: clip, twice, parts and counted call operators of our own; long computes."""
    return kernel_packages.compiled("own")


@pytest.fixture(scope="session")
def stock_kernel_package() -> pathlib.Path:
    """Made by PyTorch: clip."""
    return kernel_packages.compiled("stock")
