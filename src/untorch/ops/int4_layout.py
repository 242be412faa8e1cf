"""The layout of int4 weights for tensor cores: packing it from plain values, and its inverse, with torch alone.

A weight [n, k] of values q from 0 to 15 becomes int32 [n / 8][k / (16·t)][32][t / 2], where t is inner_k_tiles: 2, 4 or
8. It is what ``aten._convert_weight_to_int4pack`` gives on CUDA. The unit is the B operand of ``mma.m16n8k16``, a tile
of 8 outputs × 16 inputs of which each of the 32 lanes of a warp holds four values; two tiles that follow each other in
k fill one int32 of each lane, and t tiles the 4, 8 or 16 bytes that a lane reads at once.

In the word [i][o][lane][j],

    n = 8·i + lane / 4
    k = 16·t·o + 32·j + 2·(lane mod 4) + 8·p + h        for p in 0 … 3 and h in 0, 1

and the value of (p, h) lies in the nibble p + 4·h, counted from the least significant one:

    bits   31…28   27…24   23…20   19…16   15…12   11…8    7…4     3…0
    k + …  25      17      9       1       24      16      8       0         from k = 16·t·o + 32·j + 2·(lane mod 4)

So a shift by 4·p and the mask 0x000f000f leave a pair that is adjacent in k, the even one in the lower half: a register
of the operand. p = 0, 1 are the first tile's two registers, p = 2, 3 the second's.
"""

from __future__ import annotations

import torch

from untorch.ops.chunks import chunks
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["INNER_K_TILES", "LANES", "N_TILE", "nibbles_to_values", "pack_int4", "unpack_int4", "values_to_nibbles"]

INNER_K_TILES = (2, 4, 8)
N_TILE = 8
K_TILE = 16
LANES = 32


def pack_int4(values: torch.Tensor, inner_k_tiles: int = 8) -> torch.Tensor:
    """Packs values from 0 to 15, an integer tensor [n, k], into int32 [n / 8][k / (16·t)][32][t / 2].

    n must be a multiple of 8, and k of 16·inner_k_tiles. Raises InvalidArgumentError.
    """
    _check_tiles(inner_k_tiles)
    if values.dim() != 2 or values.dtype.is_floating_point or values.dtype.is_complex:
        raise InvalidArgumentError(
            f"pack_int4: values: expected integers [n, k], got {values.dtype} {tuple(values.shape)}"
        )
    n, k = values.shape
    width = K_TILE * inner_k_tiles
    if n % N_TILE or k % width:
        raise InvalidArgumentError(
            f"pack_int4: values: expected n a multiple of {N_TILE} and k a multiple of {width} (16 · inner_k_tiles), "
            f"got {n} × {k}: pad them"
        )
    if values.numel() and (int(values.min()) < 0 or int(values.max()) > 15):
        raise InvalidArgumentError(
            f"pack_int4: values: expected 0 to 15, got {int(values.min())} to {int(values.max())}"
        )
    words = inner_k_tiles // 2
    packed = torch.empty((n // N_TILE, k // width, LANES, words), dtype=torch.int32, device=values.device)
    for rows in chunks(values, k, N_TILE) if k else ():
        part, count = values[rows], (rows.stop - rows.start) // N_TILE
        # Eight values, [lane mod 4, h], are one integer: [i, n in tile, o, j, p / 2, p mod 2], the last the nibble.
        eights = part.to(torch.uint8).contiguous().view(torch.int64).reshape(count, N_TILE, k // width, words, 2, 2)
        pairs = eights[..., 0] | (eights[..., 1] << 4)
        # [i, n in tile, o, j, p / 2, lane mod 4] → [i, o, n in tile, lane mod 4, j, p / 2], of two bytes h
        ordered = pairs.view(torch.int16).reshape(*pairs.shape, 4).permute(0, 2, 1, 5, 3, 4).contiguous()
        word = ordered.view(torch.int32).reshape(count, k // width, LANES, words)
        # Bytes [p / 2, h] → [h, p / 2]: the middle ones change places.
        packed[rows.start // N_TILE : rows.stop // N_TILE] = (
            (word & -0xFFFF01) | ((word & 0xFF00) << 8) | ((word >> 8) & 0xFF00)
        )
    return packed


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_int4``: values from 0 to 15, uint8 [n, k]. Raises InvalidArgumentError."""
    if packed.dim() != 4 or packed.dtype != torch.int32 or packed.shape[2] != LANES:
        raise InvalidArgumentError(
            f"unpack_int4: packed: expected int32 [n / 8][k / (16 · inner_k_tiles)][32][inner_k_tiles / 2], got "
            f"{packed.dtype} {tuple(packed.shape)}"
        )
    tiles, outer, _, words = packed.shape
    _check_tiles(2 * words)
    places = [((packed >> (4 * place)) & 15).to(torch.uint8) for place in range(8)]
    nibbles = torch.stack(places, -1).reshape(tiles, outer, N_TILE, 4, words, 2, 4)
    return nibbles.permute(0, 2, 1, 4, 6, 3, 5).reshape(tiles * N_TILE, outer * words * 2 * K_TILE)


def values_to_nibbles(values: torch.Tensor) -> torch.Tensor:
    """What ``aten._convert_weight_to_int4pack`` takes: [n, k] to uint8 [n, k / 2], the even k in the high nibble."""
    values = values.to(torch.uint8)
    return (values[:, 0::2] << 4) | values[:, 1::2]


def nibbles_to_values(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of ``values_to_nibbles``."""
    return torch.stack((nibbles >> 4, nibbles & 15), -1).flatten(1)


def _check_tiles(inner_k_tiles: int) -> None:
    if inner_k_tiles not in INNER_K_TILES:
        raise InvalidArgumentError(f"inner_k_tiles: expected 2, 4 or 8, got {inner_k_tiles!r}")
