"""What decoder_linears refuses, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on

SHIM = "aoti_torch_cuda_decoder_linears"
BF16, F16, F64, I32 = torch.bfloat16, torch.float16, torch.float64, torch.int32
OPTIONAL = {"o_scales", "gate_up_scales", "down_scales", "next_weight", "next_scales", "next_bias"}


def dense() -> dict[str, Any]:
    return {
        "x": made_up(3, 32, dtype=BF16), "residual": made_up(3, 16, dtype=BF16),
        "o_weight": made_up(16, 32, dtype=BF16), "o_scales": None, "norm": made_up(16, dtype=BF16),
        "gate_up_weight": made_up(48, 16, dtype=BF16), "gate_up_scales": None,
        "down_weight": made_up(16, 24, dtype=BF16), "down_scales": None, "next_norm": made_up(16, dtype=BF16),
        "next_weight": made_up(40, 16, dtype=BF16), "next_scales": None, "next_bias": made_up(40, dtype=BF16),
        "group_size": 0, "eps": 1e-6, "next_eps": 1e-5,
    }  # fmt: skip


def packed() -> dict[str, Any]:
    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return made_up(n // 8, k // 128, 32, 4, dtype=I32), made_up(k // 64, n, 2, dtype=BF16)

    given = dense() | {"x": made_up(3, 256, dtype=BF16), "residual": made_up(3, 128, dtype=BF16), "group_size": 64}
    for name, n, k in (("o", 128, 256), ("gate_up", 256, 128), ("down", 128, 128), ("next", 40, 128)):
        given[f"{name}_weight"], given[f"{name}_scales"] = weight(n, k)
    return given | {"norm": made_up(128, dtype=BF16), "next_norm": made_up(128, dtype=BF16)}


def passed(given: dict[str, Any]) -> list[Any]:
    return [Opt(value) if name in OPTIONAL else value for name, value in given.items()]


def refusal(given: dict[str, Any]) -> str:
    # Two places for results: made_up's `refused` gives the last one.
    slot = ctypes.c_void_p(0x5A)
    text = refused(SHIM, *passed(given), ctypes.addressof(slot))
    assert slot.value == 0x5A
    return text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x": None}, "argument 'x' is null"),
        ({"down_weight": None}, "argument 'down_weight' is null"),
        ({"next_norm": None}, "argument 'next_norm' is null"),
        (
            {"x": made_up(3, 32, dtype=F64)},
            "argument 'x' must be bfloat16, float16 or float32 [tokens, k], got float64 [3, 32]",
        ),
        (
            {"x": made_up(1, 3, 32, dtype=BF16)},
            "argument 'x' must be bfloat16, float16 or float32 [tokens, k], got bfloat16 [1, 3, 32]",
        ),
        (
            {"residual": made_up(16, dtype=BF16)},
            "argument 'residual' must be bfloat16, float16 or float32 [tokens, width], got bfloat16 [16]",
        ),
        (
            {"residual": made_up(4, 16, dtype=BF16)},
            "argument 'residual' must be bfloat16 with 3 rows, as 'x', got bfloat16 [4, 16]",
        ),
        (
            {"residual": made_up(3, 16, dtype=F16)},
            "argument 'residual' must be bfloat16 with 3 rows, as 'x', got float16 [3, 16]",
        ),
        (
            {"group_size": 16},
            "argument 'group_size' must be 32, 64, 128 or 256 for int4 weights, or 0 for dense ones, got 16",
        ),
        (
            {"down_scales": made_up(1, 16, 2, dtype=BF16)},
            "argument 'down_scales' must be absent with a group_size of 0",
        ),
        (
            {"o_weight": made_up(16, 32, dtype=F16)},
            "argument 'o_weight' must be bfloat16 like 'x', contiguous, [n, k], got float16 [16, 32] with strides "
            "[32, 1]",
        ),
        (
            {"o_weight": made_up(32, 16, dtype=BF16).t()},
            "argument 'o_weight' must be bfloat16 like 'x', contiguous, [n, k], got bfloat16 [16, 32] with strides "
            "[1, 16]",
        ),
        (
            {"next_weight": made_up(40, dtype=BF16)},
            "argument 'next_weight' must be bfloat16 like 'x', contiguous, [n, k], got bfloat16 [40] with strides [1]",
        ),
        ({"o_weight": made_up(16, 31, dtype=BF16)}, "argument 'o_weight' must have k = 32, got 31"),
        (
            {"o_weight": made_up(17, 32, dtype=BF16)},
            "argument 'o_weight' must have n = 16, the width of 'residual', got 17",
        ),
        ({"gate_up_weight": made_up(48, 17, dtype=BF16)}, "argument 'gate_up_weight' must have k = 16, got 17"),
        (
            {"gate_up_weight": made_up(47, 16, dtype=BF16)},
            "argument 'gate_up_weight' must have an even n, the gate's and the up projection's, got 47",
        ),
        ({"down_weight": made_up(16, 25, dtype=BF16)}, "argument 'down_weight' must have k = 24, got 25"),
        (
            {"down_weight": made_up(8, 24, dtype=BF16)},
            "argument 'down_weight' must have n = 16, the width of 'residual', got 8",
        ),
        ({"next_weight": made_up(40, 24, dtype=BF16)}, "argument 'next_weight' must have k = 16, got 24"),
        ({"next_weight": None}, "arguments 'next_scales' and 'next_bias' must be absent without 'next_weight'"),
        ({"norm": made_up(16)}, "argument 'norm' must be bfloat16, got float32"),
        ({"norm": made_up(1, 16, dtype=BF16)}, "argument 'norm' must have shape [16], got [1, 16]"),
        (
            {"next_norm": made_up(32, dtype=BF16)[::2]},
            "argument 'next_norm' must be contiguous, got shape [16] with strides [2]",
        ),
        ({"next_bias": made_up(16, dtype=BF16)}, "argument 'next_bias' must have shape [40], got [16]"),
    ],
)
def test_refusals(changes: dict[str, Any], expected: str) -> None:
    assert refusal(dense() | changes) == f"decoder_linears: {expected}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"o_scales": None}, "argument 'o_scales' is missing: weights are int4, in groups of 64"),
        ({"gate_up_weight": made_up(256, 128, dtype=BF16)}, "argument 'gate_up_weight' must be int32, got bfloat16"),
        (
            {"down_weight": made_up(16, 1, 16, 4, dtype=I32)},
            "argument 'down_weight' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got shape "
            "[16, 1, 16, 4]",
        ),
        (
            {"next_scales": made_up(2, 48, 2, dtype=BF16)},
            "argument 'next_scales' must have shape [2, 40, 2] (groups, columns, scale and zero), got [2, 48, 2]",
        ),
        (
            {"next_scales": made_up(2, 40, 2, dtype=F64)},
            "argument 'next_scales' must be float32, bfloat16 or float16, got float64",
        ),
        ({"group_size": 256, "o_weight": made_up(16, 3, 32, 4, dtype=I32)}, "argument 'group_size' must divide k, got"),
        ({"x": made_up(3, 128, dtype=BF16)}, "argument 'o_weight' must have k = 128, got 256"),
        ({"next_weight": None}, "arguments 'next_scales' and 'next_bias' must be absent without 'next_weight'"),
    ],
)
def test_refusals_of_int4(changes: dict[str, Any], expected: str) -> None:
    assert refusal(packed() | changes).startswith(f"decoder_linears: {expected}")


@pytest.mark.parametrize("name", [name for name, value in packed().items() if isinstance(value, torch.Tensor)])
def test_operands_elsewhere(name: str) -> None:
    value = packed()[name]
    if name != "x":
        expected = "decoder_linears: operands are on cuda:0 and cuda:1, expected one device"
        assert refusal(packed() | {name: other(value)}) == expected
    on_cpu = torch.zeros(value.shape, dtype=value.dtype)
    assert refusal(packed() | {name: on_cpu}) == f"decoder_linears: argument '{name}' is on cpu, expected cuda"


def test_no_place_for_the_results() -> None:
    given = passed(dense())
    handles = [handle(value) for arg in given if isinstance(value := getattr(arg, "value", arg), torch.Tensor)]
    remaining = iter(handles)
    arguments: list[Any] = []
    for arg in given:
        if isinstance(arg, Opt):
            arguments.append(None if arg.value is None else ctypes.byref(next(remaining)))
        elif isinstance(arg, torch.Tensor):
            arguments.append(next(remaining))
        else:
            arguments.append(ctypes.c_double(arg) if isinstance(arg, float) else ctypes.c_int64(arg))
    slot = ctypes.c_void_p()
    for places in ((None, ctypes.byref(slot)), (ctypes.byref(slot), None)):
        with pytest.raises(ShimError, match="^decoder_linears: output pointer is null$"):
            raise_on(getattr(lib, SHIM)(*arguments, *places))
    for h in handles:
        delete(h)
