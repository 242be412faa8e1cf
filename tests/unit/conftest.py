"""Small packages, compiled once and kept under build/test-cache."""

from __future__ import annotations

import pathlib

import pytest

from tests import packages

MODELS = pathlib.Path(__file__).with_name("models.py")


def compiled(kind: str) -> pathlib.Path:
    """The package ``kind`` of models.py."""
    return packages.compiled(MODELS, kind)


@pytest.fixture(scope="session")
def own_package() -> pathlib.Path:
    """Made by untorch.export: methods linear, alias, types, counter."""
    return compiled("own")


@pytest.fixture(scope="session")
def cache_package() -> pathlib.Path:
    """Made by untorch.export: put and get on the same rows, and plain, on the same weight."""
    return compiled("cache")


@pytest.fixture(scope="session")
def rows_package() -> pathlib.Path:
    """Made by untorch.export: rows and embed with a batch of up to 8; half, bfloat16[2, 3] in and out."""
    return compiled("rows")


@pytest.fixture(scope="session")
def forms_package() -> pathlib.Path:
    """Made by untorch.export: a dict, a list of a tuple, a flag and a keyword in; a list and a dict out."""
    return compiled("forms")


@pytest.fixture(scope="session")
def stock_tree() -> pathlib.Path:
    """Made by PyTorch: a dict and a keyword in; a dict with an alias, a list and a None out."""
    return compiled("stock_tree")


@pytest.fixture(scope="session")
def stock_dynamic() -> pathlib.Path:
    """Made by PyTorch: float32[b, 4], int64[b], float32[4, n] column-major, float32[2*n] and float32[4, 1, 3]."""
    return compiled("stock_dynamic")


@pytest.fixture(scope="session")
def stock_linear() -> pathlib.Path:
    """Made by PyTorch, weights in the library."""
    return compiled("stock_linear")


@pytest.fixture(scope="session")
def stock_blob() -> pathlib.Path:
    """Made by PyTorch, weights beside the library."""
    return compiled("stock_blob")
