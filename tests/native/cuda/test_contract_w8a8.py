"""What linear layers with 8-bit weights refuse on CUDA, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on
from tests.native.w8_weights import BF16, I8, Args, refusals

LINEAR = "aoti_torch_cuda_w8a8_linear"


def operands() -> tuple[torch.Tensor, ...]:
    return made_up(3, 64, dtype=BF16), made_up(32, 64, dtype=I8), made_up(32)


@pytest.mark.parametrize(("args", "expected"), refusals(made_up))
def test_w8a8_linear(args: Args, expected: str) -> None:
    assert refused(LINEAR, *args[:3], Opt(args[3])).startswith(expected)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_several_devices(place: int) -> None:
    tensors = [*operands(), made_up(32, dtype=BF16)]
    expected = "w8a8_linear: operands are on cuda:0 and cuda:1, expected one device"
    elsewhere = [other(tensor) if i == place else tensor for i, tensor in enumerate(tensors)]
    assert refused(LINEAR, *elsewhere[:3], Opt(elsewhere[3])) == expected


@pytest.mark.parametrize("place", range(4))
def test_operands_on_the_cpu(place: int) -> None:
    tensors = [*operands(), made_up(32, dtype=BF16)]
    name = ("x", "weight", "scale", "bias")[place]
    tensors[place] = torch.zeros(tensors[place].shape, dtype=tensors[place].dtype)
    expected = f"w8a8_linear: argument '{name}' is on cpu, expected cuda"
    assert refused(LINEAR, *tensors[:3], Opt(tensors[3])) == expected


def test_no_place_for_the_result() -> None:
    handles = [handle(tensor) for tensor in operands()]
    with pytest.raises(ShimError, match="^w8a8_linear: output pointer is null$"):
        raise_on(getattr(lib, LINEAR)(*handles, ctypes.c_void_p(), None))
    for h in handles:
        delete(h)
