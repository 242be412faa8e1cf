"""CUDA shims on torch's stream."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def torch_stream(streams_of_the_librarys_own: None) -> None:
    from tests.native.shim import use_torch_stream

    use_torch_stream()
