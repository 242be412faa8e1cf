"""What pages of a KV cache hold: the model's dtype, or int8 or FP8 codes with a scale for each token and head.

A layer's part of a block in the model's dtype is K [heads_kv, block, width], V [heads_kv, block, width_v]. In int8 or
float8_e4m3fn these are codes, and two lists of bfloat16 follow: scales of K [heads_kv, block], scales of V likewise. An
element is code · scale. The scale is max|x| / 127 (int8) or / 448 (FP8), rounded up to bfloat16, so no code is clipped.
A row with an infinity or NaN has NaN as its scale. Every kernel makes the same codes, bit for bit.
"""

from __future__ import annotations

import torch

__all__ = ["ALIGNMENT", "KV_DTYPES", "LARGEST_CODE", "Pages", "block_elements", "dequantize_rows", "quantize_rows"]

# By the name that causal_lm takes.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ALIGNMENT = 16  # bytes, of a layer's part of a block of codes
_SCALE_BYTES = 2
_NAN = 0x7FC0  # bits of bfloat16


def block_elements(dtype: torch.dtype, heads_kv: int, block: int, width: int, width_v: int) -> int:
    """A layer's part of a block, in elements of the pool."""
    scales = 2 * _SCALE_BYTES if dtype in LARGEST_CODE else 0
    return heads_kv * block * (width + width_v + scales)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., width] and scales [...], bfloat16. Codes are rounded to nearest, ties to even."""
    x = x.float()
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    # A product with the reciprocal, as a kernel computes it; the bits of a positive float32 + 0xffff round up.
    bits = (largest * torch.tensor(1.0 / LARGEST_CODE[dtype])).view(torch.int32)
    bits = torch.where(largest.isfinite(), (bits + 0xFFFF) >> 16, _NAN)
    scales = bits.to(torch.int16).view(torch.bfloat16)
    codes = torch.where((scales > 0)[..., None], x / scales.float()[..., None], 0.0)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32."""
    return codes.float() * scales.float()[..., None]


class Pages:
    """A layer's keys and values in a pool [blocks, elements], from ``offset`` on in each block: views of it."""

    def __init__(self, pool: torch.Tensor, offset: int, block: int, heads_kv: int, width: int, width_v: int) -> None:
        self.dtype = pool.dtype
        self._scales: list[torch.Tensor] = []
        if self.dtype in LARGEST_CODE:
            pool = pool.view(torch.uint8)  # float8 can neither be indexed nor written by index
        shape, at = (pool.shape[0], heads_kv, block), offset
        self._data = []
        for size in (width, width_v):
            end = at + heads_kv * block * size
            self._data.append(pool[:, at:end].view(*shape, size))
            at = end
        for _ in self._data if self.dtype in LARGEST_CODE else ():
            end = at + heads_kv * block * _SCALE_BYTES
            self._scales.append(pool[:, at:end].view(torch.bfloat16).view(shape))
            at = end

    def write(self, page: torch.Tensor, place: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [tokens, heads_kv, …] to those places of those pages."""
        for i, rows in enumerate((k, v)):
            if self._scales:
                codes, scales = quantize_rows(rows, self.dtype)
                self._data[i][page, :, place] = codes.view(torch.uint8)
                self._scales[i][page, :, place] = scales
            else:
                self._data[i][page, :, place] = rows

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these pages, one behind the other, [heads_kv, positions, …] in float32."""
        found = []
        for i, data in enumerate(self._data):
            rows = data[pages]
            if self._scales:
                rows = dequantize_rows(rows.view(self.dtype), self._scales[i][pages])
            found.append(rows.float().transpose(0, 1).flatten(1, 2))
        return found[0], found[1]
