"""What int4 linear layers refuse on CUDA, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.int4_weights import Args, linear_refusals
from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on

BF16, I32 = torch.bfloat16, torch.int32


def pack_refusals() -> list[tuple[tuple[Any, ...], str]]:
    """Arguments of _weight_int4pack_mm (self, mat2, qGroupSize, qScaleAndZeros)."""
    x, w, s = made_up(3, 128, dtype=BF16), made_up(2, 1, 32, 4, dtype=I32), made_up(2, 16, 2, dtype=BF16)
    op = "_weight_int4pack_mm"
    layout = f"{op}: argument 'mat2' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got shape"
    return [
        ((None, w, 64, s), f"{op}: argument 'self' is null"),
        ((x, None, 64, s), f"{op}: argument 'mat2' is null"),
        ((x, w, 64, None), f"{op}: argument 'qScaleAndZeros' is null"),
        ((torch.zeros(3, 128, dtype=BF16), w, 64, s), f"{op}: argument 'self' is on cpu, expected cuda"),
        ((x, torch.zeros(2, 1, 32, 4, dtype=I32), 64, s), f"{op}: argument 'mat2' is on cpu, expected cuda"),
        ((x, w, 64, torch.zeros(2, 16, 2, dtype=BF16)), f"{op}: argument 'qScaleAndZeros' is on cpu, expected cuda"),
        ((made_up(3, 128, dtype=torch.float16), w, 64, s), f"{op}: argument 'self' must be bfloat16, got float16"),
        ((made_up(128, dtype=BF16), w, 64, s), f"{op}: argument 'self' must be 2-D, got shape [128]"),
        ((made_up(128, 3, dtype=BF16).t(), w, 64, s),
         f"{op}: argument 'self' must be contiguous, got shape [3, 128] with strides [1, 3]"),
        ((made_up(3, 136, dtype=BF16)[:, :128], w, 64, s),
         f"{op}: argument 'self' must be contiguous, got shape [3, 128] with strides [136, 1]"),
        ((x, made_up(2, 1, 32, 4), 64, s), f"{op}: argument 'mat2' must be int32, got float32"),
        ((x, made_up(2, 32, 4, dtype=I32), 64, s), f"{layout} [2, 32, 4]"),
        ((x, made_up(2, 1, 64, 2, dtype=I32), 64, s), f"{layout} [2, 1, 64, 2]"),
        ((x, made_up(2, 1, 32, 8, dtype=I32), 64, s),
         f"{op}: argument 'mat2' must have 1, 2 or 4 in its last dimension (inner_k_tiles 2, 4 or 8), got shape "
         "[2, 1, 32, 8]"),
        ((x, made_up(2, 1, 32, 8, dtype=I32)[..., ::2], 64, s),
         f"{op}: argument 'mat2' must be contiguous, got shape [2, 1, 32, 4] with strides [256, 256, 8, 2]"),
        ((x, w, 16, s), f"{op}: argument 'qGroupSize' must be 32, 64, 128 or 256, got 16"),
        ((x, w, 256, s), f"{op}: argument 'qGroupSize' must divide k, got 256 for a weight of k = 128"),
        ((x, w, 64, made_up(16, 2, 2, dtype=BF16)),
         f"{op}: argument 'qScaleAndZeros' must have shape [2, 16, 2] (groups, columns, scale and zero), got "
         "[16, 2, 2]"),
        ((x, w, 64, made_up(2, 2, 16, dtype=BF16).mT),
         f"{op}: argument 'qScaleAndZeros' must be contiguous, got shape [2, 16, 2] with strides [32, 1, 16]"),
        ((x, w, 64, made_up(2, 16, 2)), f"{op}: argument 'qScaleAndZeros' must be bfloat16, got float32"),
        ((made_up(3, 64, dtype=BF16), w, 64, s),
         f"{op}: the inner sizes differ: 'self' is [3, 64], 'mat2' of shape [2, 1, 32, 4] holds k = 128"),
        ((x, w, 64, other(s)), f"{op}: operands are on cuda:0 and cuda:1, expected one device"),
        ((x, other(w), 64, s), f"{op}: operands are on cuda:0 and cuda:1, expected one device"),
    ]  # fmt: skip


@pytest.mark.parametrize(("args", "expected"), pack_refusals())
def test_weight_int4pack_mm(args: tuple[Any, ...], expected: str) -> None:
    assert refused("aoti_torch_cuda__weight_int4pack_mm", *args) == expected


@pytest.mark.parametrize(("args", "expected"), linear_refusals(made_up))
def test_int4_linear(args: Args, expected: str) -> None:
    assert refused("aoti_torch_cuda_int4_linear", *args[:4], Opt(args[4])) == expected


def test_int4_linear_on_several_devices() -> None:
    x, w, s = made_up(3, 128, dtype=BF16), made_up(2, 1, 32, 4, dtype=I32), made_up(2, 16, 2, dtype=BF16)
    bias = made_up(16, dtype=BF16)
    name, expected = (
        "aoti_torch_cuda_int4_linear",
        "int4_linear: operands are on cuda:0 and cuda:1, expected one device",
    )
    assert refused(name, x, other(w), s, 64, Opt(None)) == expected
    assert refused(name, x, w, other(s), 64, Opt(None)) == expected
    assert refused(name, x, w, s, 64, Opt(other(bias))) == expected
    on_cpu = torch.zeros(16, dtype=BF16)
    assert refused(name, x, w, s, 64, Opt(on_cpu)) == "int4_linear: argument 'bias' is on cpu, expected cuda"
    assert refused(name, on_cpu, w, s, 64, Opt(None)) == "int4_linear: argument 'x' is on cpu, expected cuda"


def test_no_place_for_the_result() -> None:
    x, w, s = made_up(3, 128, dtype=BF16), made_up(2, 1, 32, 4, dtype=I32), made_up(2, 16, 2, dtype=BF16)
    for name, args in [
        ("aoti_torch_cuda__weight_int4pack_mm", (x, w, 64, s)),
        ("aoti_torch_cuda_int4_linear", (x, w, s, 64, Opt(None))),
    ]:
        handles = [handle(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        c_args = [ctypes.c_int64(h) if isinstance(h, int) else None if isinstance(h, Opt) else h for h in handles]
        with pytest.raises(ShimError, match=f"^{name.removeprefix('aoti_torch_cuda_')}: output pointer is null$"):
            raise_on(getattr(lib, name)(*c_args, None))
        for h in handles:
            if isinstance(h, ctypes.c_void_p):
                delete(h)
