"""Fixtures: CUDA shims' contracts need a library that was built with nvcc, and no GPU.

Loading and streams need none either: they run a compiled file with a fake CUDA driver (fake_driver.cpp).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.native.cuda.fake_gpu import build_driver
from tests.native.shim import lib

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if hasattr(lib, "aoti_torch_cuda_mm_out"):
        return
    skip = pytest.mark.skip(reason="the library was built without nvcc and has no CUDA shims")
    for item in items:
        if _FOLDER in item.path.parents and item.path.name != "test_caller_stream.py":
            item.add_marker(skip)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(500, 896), nn.Linear(896, 255, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that libcuda.so.1 is in."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in int4 and in NVFP4, for sm_90."""
    pytest.importorskip("triton")
    from untorch.export import export

    path = tmp_path_factory.mktemp("package") / "model.pt2"
    torch.manual_seed(0)
    entry = {
        "model": Two().half(),
        "args": (torch.randn(4, 500).half(),),
        "dynamic_shapes": ({0: Dim("rows", min=1, max=4096)},),
    }
    quantize = {"int4": {"dtype": "int4", "method": "rtn"}, "nvfp4": {"dtype": "nvfp4", "method": "rtn"}}
    export(
        methods={"int4": entry, "nvfp4": entry}, path=path, device="cuda", arch="sm_90", quantize=quantize, progress=False
    )  # fmt: skip
    return path
