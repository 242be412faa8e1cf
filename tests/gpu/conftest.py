"""What every GPU test needs: a GPU, and CUDA shims on torch's stream."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "tests/gpu needs an NVIDIA GPU and a torch with CUDA: run it with `make test-gpu` there"
        )


@pytest.fixture(autouse=True)
def torch_stream() -> None:
    from tests.native.shim import use_torch_stream

    use_torch_stream()
