"""Small packages, compiled once and kept under build/test-cache."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = pathlib.Path(__file__).with_name("models.py")


def compiled(kind: str) -> pathlib.Path:
    """The package ``kind`` of models.py; compiled in a process of its own, so that this one stays without PyTorch."""
    torch = pytest.importorskip("importlib.metadata")
    try:
        version = torch.version("torch")
    except torch.PackageNotFoundError:
        pytest.skip("needs PyTorch to compile the test's model")
    sources = [MODELS, *sorted((ROOT / "src/untorch/export").rglob("*.py")), ROOT / "src/untorch/archive.py"]
    key = hashlib.blake2b(digest_size=8)
    for part in (version, kind, *(source.read_text() for source in sources)):
        key.update(part.encode())
    path = ROOT / "build" / "test-cache" / key.hexdigest() / f"{kind}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{kind}.{os.getpid()}.pt2")
        subprocess.run([sys.executable, str(MODELS), kind, str(part)], check=True, stdout=subprocess.DEVNULL)
        part.replace(path)
    return path


@pytest.fixture(scope="session")
def own_package() -> pathlib.Path:
    """Made by untorch.export: methods linear, alias, types, counter."""
    return compiled("own")


@pytest.fixture(scope="session")
def cache_package() -> pathlib.Path:
    """Made by untorch.export: put and get on the same rows, and plain, on the same weight."""
    return compiled("cache")


@pytest.fixture(scope="session")
def forms_package() -> pathlib.Path:
    """Made by untorch.export: a dict, a list of a tuple, a flag and a keyword in; a list and a dict out."""
    return compiled("forms")


@pytest.fixture(scope="session")
def stock_tree() -> pathlib.Path:
    """Made by PyTorch: a dict and a keyword in; a dict with an alias, a list and a None out."""
    return compiled("stock_tree")


@pytest.fixture(scope="session")
def stock_linear() -> pathlib.Path:
    """Made by PyTorch, weights in the library."""
    return compiled("stock_linear")


@pytest.fixture(scope="session")
def stock_blob() -> pathlib.Path:
    """Made by PyTorch, weights beside the library."""
    return compiled("stock_blob")
