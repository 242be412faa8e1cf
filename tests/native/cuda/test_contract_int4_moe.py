"""What int4 MoE refuses on CUDA, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.int4_experts import NAMES, Args, Experts, moe_refusals
from tests.native.nvfp4_experts import random_routing
from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on

MOE = "aoti_torch_cuda_int4_moe"
TENSORS = (*NAMES, "w13_bias", "w2_bias")


def operands() -> list[torch.Tensor]:
    """With both biases, as the last two."""
    on_cpu = [torch.zeros(3, 32), *random_routing(3, 2, 4), *Experts(4, 32, 32, 32).packed]
    on_cpu += [torch.zeros(4, 64), torch.zeros(4, 32)]
    return [made_up(*tensor.shape, dtype=tensor.dtype) for tensor in on_cpu]


def call_with(tensors: list[torch.Tensor]) -> str:
    return refused(MOE, *tensors[:7], 32, 32, Opt(tensors[7]), Opt(tensors[8]), 1.702, 1.0, Opt(7.0, "double"))


@pytest.mark.parametrize(("args", "expected"), moe_refusals(made_up, True))
def test_int4_moe(args: Args, expected: str) -> None:
    assert refused(MOE, *args) == expected


@pytest.mark.parametrize("place", range(1, 9))
def test_several_devices(place: int) -> None:
    tensors = operands()
    tensors[place] = other(tensors[place])
    assert call_with(tensors) == "int4_moe: operands are on cuda:0 and cuda:1, expected one device"


@pytest.mark.parametrize("place", range(9))
def test_operands_on_the_cpu(place: int) -> None:
    tensors = operands()
    tensors[place] = torch.zeros(tensors[place].shape, dtype=tensors[place].dtype)
    assert call_with(tensors) == f"int4_moe: argument '{TENSORS[place]}' is on cpu, expected cuda"


def test_no_place_for_the_result() -> None:
    handles = [handle(tensor) for tensor in operands()[:7]]
    sizes = ctypes.c_int64(32), ctypes.c_int64(32)
    with pytest.raises(ShimError, match="^int4_moe: output pointer is null$"):
        raise_on(
            getattr(lib, MOE)(*handles, *sizes, None, None, ctypes.c_double(1.0), ctypes.c_double(0.0), None, None)
        )
    for h in handles:
        delete(h)
