"""Operands of the W4A4 GEMM (``prefill="fp4"``): x in NVFP4 with a scale per row; cuBLASLt's block scale layout."""

from __future__ import annotations

import torch

from untorch.ops.nvfp4_layout import e2m1_values

E4M3 = torch.float8_e4m3fn
LARGEST = 6.0 * 448.0


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """To nearest, ties to the even mantissa, 6 at most; with the sign of what is less than 0, in bit 3."""
    size = values.abs()
    codes = torch.zeros_like(size, dtype=torch.int64)
    for code, limit in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += (size >= limit) if code % 2 else (size > limit)
    return codes + 8 * (values < 0)


def rows_in_float4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [m, k], scales in E4M3 [m, k / 16] and float32 scales of rows [m] for finite x [m, k], k a multiple of 16."""
    size = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-110)
    by = torch.full_like(size, LARGEST) / size  # a number over a tensor would be its reciprocal times the number
    blocks = x.float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1)
    scales = (largest * by / 6.0).to(E4M3)
    least = torch.tensor([1], dtype=torch.uint8).view(E4M3)
    scales = torch.where((scales.float() == 0) & (largest > 0), least.float(), scales.float()).to(E4M3)
    factor = torch.where(scales.float() == 0, 0.0, by / scales.float())
    return e2m1_codes(blocks * factor.unsqueeze(-1)).flatten(-2), scales, (size / LARGEST).squeeze(-1)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [m, k] with any k as it is multiplied, float64."""
    k = x.shape[1]
    codes, scales, of_rows = rows_in_float4(torch.nn.functional.pad(x, (0, -k % 16)))
    values = e2m1_values(codes, torch.float64) * scales.double().repeat_interleave(16, 1)
    return (values * of_rows.double().unsqueeze(-1))[:, :k]


def most_apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What docs/quantization.md says: x float64 [m, k], w [n, k]."""
    pad = 0, -x.shape[-1] % 16
    blocks, size = torch.nn.functional.pad(x, pad).unflatten(-1, (-1, 16)), x.abs().amax(-1, keepdim=True)
    apart = 0.178 * blocks.abs().amax(-1) + 2.0**-7 * size.clamp(min=2.0**-110) / LARGEST
    return apart @ torch.nn.functional.pad(w, pad).unflatten(-1, (-1, 16)).abs().sum(-1).t()


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] as bytes [rows / 128 · blocks / 4 · 512], both padded with zeros: cuBLASLt's layout."""
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()
