"""The contracts of CUDA shims need a library that has them: one built where nvcc is. They need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.shim import lib

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if hasattr(lib, "aoti_torch_cuda_mm_out"):
        return
    skip = pytest.mark.skip(reason="the library was built without nvcc and has no CUDA shims")
    for item in items:
        if _FOLDER in item.path.parents and item.path.name != "test_caller_stream.py":
            item.add_marker(skip)
