"""What _fused_rms_norm and _thnn_fused_lstm_cell on CUDA refuse. Needs no GPU: the tensors' address is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.cuda.test_contract_attention import fake, refused


def rms_norm(expected: str, x: Any, shape: list[int], weight: Any = None) -> None:
    values = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    refused("_fused_rms_norm", [x, values, len(shape), weight, None], 2, f"_fused_rms_norm: {expected}")


def test_rms_norm() -> None:
    rms_norm("argument 'input' is null", None, [4])
    rms_norm("argument 'normalized_shape' must have 1 to 2 values, got []", fake((2, 4)), [])
    rms_norm("argument 'input' must end in [5], got shape [2, 4]", fake((2, 4)), [5])
    rms_norm("argument 'weight' must have shape [4], got [2]", fake((2, 4)), [4], (fake((2,)),))
    rms_norm(
        "argument 'input' must be float16, bfloat16, float32 or float64, got int64", fake((2, 4), torch.int64), [4]
    )
    rms_norm(
        "argument 'weight' must be floating-point, got int32", fake((2, 4)), [4], (fake((4,), torch.int32),)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "shapes"),
    [
        ("argument 'input_gates' must be 2-D (batch, 4 * hidden), got shape [2, 10]", [(2, 10), (2, 10), (2, 2)]),
        ("argument 'hidden_gates' must have shape [2, 8], got [1, 8]", [(2, 8), (1, 8), (2, 2)]),
        ("argument 'cx' must have shape [2, 2], got [2, 8]", [(2, 8), (2, 8), (2, 8)]),
        ("argument 'input_bias' must have shape [8], got [2]", [(2, 8), (2, 8), (2, 2), (2,)]),
        ("'input_bias' and 'hidden_bias' must be both given or both absent", [(2, 8), (2, 8), (2, 2), (8,)]),
    ],
)
def test_lstm_cell(expected: str, shapes: list[tuple[int, ...]]) -> None:
    handles = [fake(shape) for shape in shapes]
    args: list[Any] = [*handles[:3], (handles[3],) if len(handles) > 3 else None, None]
    refused("_thnn_fused_lstm_cell", args, 3, f"_thnn_fused_lstm_cell: {expected}")
