"""Operands of the W8A8 GEMM (``prefill="fp8"``): x and weights in E4M3 with their scales; and an error bound."""

from __future__ import annotations

import torch

from untorch.ops.nvfp4_layout import dequantize_nvfp4

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def rows_in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., k] in E4M3, and the scale of each row, float64 [.., 1]; for finite x."""
    size = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-110)
    by = torch.full_like(size, LARGEST) / size  # a number over a tensor would be its reciprocal times the number
    return (x.float() * by).to(E4M3), (size / LARGEST).double()


def weight_in_float8(
    packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in E4M3, and the scale of each row, float64 [n]."""
    values = dequantize_nvfp4(packed, block_scale, torch.tensor(1.0))
    return (values / 8).to(E4M3), (8 * global_scale).double().expand(values.shape[0])


def most_apart(x: torch.Tensor, w: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor) -> torch.Tensor:
    """What docs/quantization.md says: x float64 [.., k], w [n, k]; their scales in float8, [.., 1] and [n]."""
    a, b = 2.0**-10 * of_rows, 2.0**-10 * of_columns
    small = a * w.abs().sum(1) + b * x.abs().sum(-1, keepdim=True)
    return 0.129 * (x.abs() @ w.abs().t()) + 1.07 * small + x.shape[-1] * a * b
