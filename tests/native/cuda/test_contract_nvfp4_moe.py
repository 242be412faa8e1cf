"""What a mixture of experts in NVFP4 refuses on CUDA, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.nvfp4_experts import NAMES, Args, moe_refusals, random_experts, random_routing
from tests.native.shim import ShimError, delete, handle, lib, raise_on

MOE = "aoti_torch_cuda_nvfp4_moe"


def operands() -> list[torch.Tensor]:
    on_cpu = [torch.zeros(3, 32), *random_routing(3, 2, 4), *random_experts(4, 32, 32, False)]
    return [made_up(*tensor.shape, dtype=tensor.dtype) for tensor in on_cpu]


@pytest.mark.parametrize(("args", "expected"), moe_refusals(made_up))
def test_nvfp4_moe(args: Args, expected: str) -> None:
    assert refused(MOE, *args) == expected


@pytest.mark.parametrize("place", range(1, 9))
def test_several_devices(place: int) -> None:
    tensors = operands()
    tensors[place] = other(tensors[place])
    assert refused(MOE, *tensors) == "nvfp4_moe: operands are on cuda:0 and cuda:1, expected one device"


@pytest.mark.parametrize("place", range(9))
def test_operands_on_the_cpu(place: int) -> None:
    tensors = operands()
    tensors[place] = torch.zeros(tensors[place].shape, dtype=tensors[place].dtype)
    assert refused(MOE, *tensors) == f"nvfp4_moe: argument '{NAMES[place]}' is on cpu, expected cuda"


def test_no_place_for_the_result() -> None:
    handles = [handle(tensor) for tensor in operands()]
    with pytest.raises(ShimError, match="^nvfp4_moe: output pointer is null$"):
        raise_on(getattr(lib, MOE)(*handles, None))
    for h in handles:
        delete(h)
