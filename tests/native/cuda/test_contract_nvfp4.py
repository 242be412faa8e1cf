"""What NVFP4 linear layers refuse on CUDA, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.nvfp4_weights import BF16, E4M3, I32, PREFILL_REFUSALS, Args, linear_refusals
from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on

LINEAR = "aoti_torch_cuda_nvfp4_linear"


def operands() -> tuple[torch.Tensor, ...]:
    return made_up(3, 128, dtype=BF16), made_up(2, 1, 32, 4, dtype=I32), made_up(16, 8, dtype=E4M3), made_up()


@pytest.mark.parametrize(("args", "expected"), linear_refusals(made_up))
def test_nvfp4_linear(args: Args, expected: str) -> None:
    assert refused(LINEAR, *args[:4], Opt(args[4]), "exact") == expected


@pytest.mark.parametrize(("prefill", "expected"), PREFILL_REFUSALS)
def test_unknown_prefill(prefill: str | None, expected: str) -> None:
    assert refused(LINEAR, *operands(), Opt(None), prefill) == expected


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_several_devices(place: int) -> None:
    tensors = [*operands(), made_up(16, dtype=BF16)]
    expected = "nvfp4_linear: operands are on cuda:0 and cuda:1, expected one device"
    elsewhere = [other(tensor) if i == place else tensor for i, tensor in enumerate(tensors)]
    assert refused(LINEAR, *elsewhere[:4], Opt(elsewhere[4]), "exact") == expected


@pytest.mark.parametrize("place", range(5))
def test_operands_on_the_cpu(place: int) -> None:
    tensors = [*operands(), made_up(16, dtype=BF16)]
    name = ("x", "weight_packed", "block_scale", "global_scale", "bias")[place]
    tensors[place] = torch.zeros(tensors[place].shape, dtype=tensors[place].dtype)
    expected = f"nvfp4_linear: argument '{name}' is on cpu, expected cuda"
    assert refused(LINEAR, *tensors[:4], Opt(tensors[4]), "exact") == expected


def test_no_place_for_the_result() -> None:
    handles = [handle(tensor) for tensor in operands()]
    with pytest.raises(ShimError, match="^nvfp4_linear: output pointer is null$"):
        raise_on(getattr(lib, LINEAR)(*handles, ctypes.c_void_p(), b"exact", None))
    for h in handles:
        delete(h)
