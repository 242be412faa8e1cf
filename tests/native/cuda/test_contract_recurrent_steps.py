"""What recurrent_steps refuses, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.shim import Opt

SHIM = "aoti_torch_cuda_recurrent_steps"
OPTIONAL = {"bias_hidden", "cx", "lengths"}


def lstm() -> dict[str, Any]:
    return {
        "input_gates": made_up(5, 3, 56), "w_hidden": made_up(2, 28, 7), "bias_hidden": made_up(2, 28),
        "hx": made_up(2, 3, 7), "cx": made_up(2, 3, 7), "lengths": made_up(3, dtype=torch.int64), "cell": "lstm",
    }  # fmt: skip


def refusal(given: dict[str, Any]) -> str:
    # Three places for results: made_up's `refused` gives the last one.
    slots = [ctypes.c_void_p(0x5A) for _ in range(2)]
    arguments = [Opt(value) if name in OPTIONAL else value for name, value in given.items()]
    text = refused(SHIM, *arguments, *(ctypes.addressof(slot) for slot in slots))
    assert all(slot.value == 0x5A for slot in slots)
    return text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"input_gates": None}, "argument 'input_gates' is null"),
        ({"w_hidden": None}, "argument 'w_hidden' is null"),
        ({"hx": None}, "argument 'hx' is null"),
        ({"cell": "mgu"}, "cell 'mgu' is not supported, expected tanh, relu, lstm or gru"),
        (
            {"input_gates": made_up(5, 3, 56, dtype=torch.float64)},
            "argument 'input_gates' must be float32, bfloat16 or float16, got float64",
        ),
        (
            {"input_gates": made_up(5, 168)},
            "argument 'input_gates' must be [steps, batch, directions * gates * hidden], got shape [5, 168]",
        ),
        (
            {"hx": made_up(3, 3, 7)},
            "argument 'hx' must be [directions, batch, hidden] with 1 or 2 directions, got shape [3, 3, 7]",
        ),
        (
            {"hx": made_up(2, 21)},
            "argument 'hx' must be [directions, batch, hidden] with 1 or 2 directions, got shape [2, 21]",
        ),
        ({"cx": None}, "argument 'cx' is missing"),
        ({"cell": "gru"}, "argument 'cx' is for an LSTM only"),
        (
            {"cell": "gru", "cx": None},
            "argument 'input_gates' must have shape [5, 3, 42], got [5, 3, 56]",
        ),
        (
            {"w_hidden": made_up(2, 28, 7, dtype=torch.float16)},
            "argument 'w_hidden' must be float32, got float16",
        ),
        ({"w_hidden": made_up(2, 28, 8)}, "argument 'w_hidden' must have shape [2, 28, 7], got [2, 28, 8]"),
        ({"bias_hidden": made_up(56)}, "argument 'bias_hidden' must have shape [2, 28], got [56]"),
        ({"hx": made_up(2, 4, 7)}, "argument 'hx' must have shape [2, 3, 7], got [2, 4, 7]"),
        ({"cx": made_up(2, 3, 6)}, "argument 'cx' must have shape [2, 3, 7], got [2, 3, 6]"),
        ({"lengths": made_up(3, dtype=torch.int32)}, "argument 'lengths' must be int64, got int32"),
        ({"lengths": made_up(4, dtype=torch.int64)}, "argument 'lengths' must have shape [3], got [4]"),
        (
            {"w_hidden": other(made_up(2, 28, 7))},
            "operands are on cuda:0 and cuda:1, expected one device",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], expected: str) -> None:
    assert refusal(lstm() | changes) == f"recurrent_steps: {expected}"
