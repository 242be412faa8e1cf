"""The layout of weights of four bits for integer dot products: packing it, and its inverse, with torch alone.

A weight [n, k] of values from 0 to 15, with a scale and a zero for each ``group_size`` inputs, or of codes of NVFP4
with a scale for each 16, becomes

    weight          int32 [ceil(n / 16)][k / 8][16]         scale_and_zero  [ceil(n / 16)][k / group_size][2][16]
                                                            block_scale     [ceil(n / 16)][k / 16][16]

padded with zeros behind n; where all zeros are 0 without them, [1][16]. The word [j][o][i] holds the output 16·j + i
and the inputs 8·o to 8·o + 7; byte b of it has the input 8·o + b in its low half and 8·o + 4 + b in its high half. A
mask leaves four neighbours of k in a 32-bit lane, which is what ``vpdpbusd`` (VNNI) multiplies, and 16 outputs beside
each other are a vector of AVX-512 or two of AVX2.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["W4A8_BLOCK", "pack_nvfp4_w4a8", "pack_w4a8", "unpack_nvfp4_w4a8", "unpack_w4a8"]

W4A8_BLOCK = 16
_WORD = 8  # values
# Outputs that are packed at once: their values take a byte each.
_ROWS = 4096


def pack_w4a8(values: torch.Tensor, scale_and_zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs values from 0 to 15, uint8 [n, k], and their scales and zeros [k / group_size, n, 2].

    k must be a multiple of the group size, 32 or more.
    """
    n, panels, groups = values.shape[0], -(-values.shape[0] // W4A8_BLOCK), scale_and_zero.shape[0]
    parts = 2 if scale_and_zero[..., 1].any() else 1
    scales = nn.functional.pad(scale_and_zero[..., :parts], (0, 0, 0, panels * W4A8_BLOCK - n))
    return _pack_words(values), scales.reshape(groups, panels, W4A8_BLOCK, parts).permute(1, 0, 3, 2).contiguous()


def pack_nvfp4_w4a8(codes: torch.Tensor, block_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs codes from 0 to 15, uint8 [n, k], and their scales, float8_e4m3fn [n, k / 16]. k: a multiple of 32."""
    n, blocks = block_scale.shape
    panels = -(-n // W4A8_BLOCK)
    scales = nn.functional.pad(block_scale.view(torch.uint8), (0, 0, 0, panels * W4A8_BLOCK - n))
    scales = scales.reshape(panels, W4A8_BLOCK, blocks).transpose(1, 2).contiguous()
    return _pack_words(codes), scales.view(torch.float8_e4m3fn)


def _pack_words(values: torch.Tensor) -> torch.Tensor:
    n, k = values.shape
    panels = -(-n // W4A8_BLOCK)
    weight = torch.empty((panels, k // _WORD, W4A8_BLOCK), dtype=torch.int32)
    for first in range(0, n, _ROWS):
        part = values[first : first + _ROWS]
        count = -(-part.shape[0] // W4A8_BLOCK)
        padded = nn.functional.pad(part, (0, 0, 0, count * W4A8_BLOCK - part.shape[0]))
        halves = padded.reshape(count, W4A8_BLOCK, k // _WORD, 2, 4).transpose(1, 2)
        bytes_of_words = halves[..., 0, :] | (halves[..., 1, :] << 4)
        start = first // W4A8_BLOCK
        weight[start : start + count] = bytes_of_words.contiguous().view(torch.int32).squeeze(-1)
    return weight


def unpack_w4a8(
    weight: torch.Tensor, scale_and_zero: torch.Tensor, out_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``pack_w4a8``: values [out_features, k], scales and zeros [k / group_size, out_features, 2]."""
    panels, groups, parts, _ = scale_and_zero.shape
    scales = scale_and_zero.permute(1, 0, 3, 2).reshape(groups, panels * W4A8_BLOCK, parts)
    return _unpack_words(weight)[:out_features], nn.functional.pad(scales[:, :out_features], (0, 2 - parts))


def unpack_nvfp4_w4a8(
    weight: torch.Tensor, block_scale: torch.Tensor, out_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``pack_nvfp4_w4a8``: codes [out_features, k] and scales [out_features, k / 16]."""
    panels, blocks, _ = block_scale.shape
    scales = block_scale.view(torch.uint8).transpose(1, 2).reshape(panels * W4A8_BLOCK, blocks)
    return _unpack_words(weight)[:out_features], scales[:out_features].contiguous().view(torch.float8_e4m3fn)


def _unpack_words(weight: torch.Tensor) -> torch.Tensor:
    panels, words, _ = weight.shape
    halves = weight.unsqueeze(-1).contiguous().view(torch.uint8)
    both = torch.stack([halves & 15, halves >> 4], -2).transpose(1, 2)
    return both.reshape(panels * W4A8_BLOCK, words * _WORD)
