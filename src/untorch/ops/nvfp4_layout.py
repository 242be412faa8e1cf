"""NVFP4, four-bit floating point with a scale for each 16: packing, unpacking and its values, with torch alone.

A weight [n, k] is w = e2m1 · block_scale · global_scale. e2m1 has a sign in bit 3, two bits of exponent and one of
mantissa:

    code   0     1     2     3     4     5     6     7      8 … 15
    e2m1   0     0.5   1     1.5   2     3     4     6      the same, negative (8 is −0)

Each 16 neighbours in k share a block_scale, float8_e4m3fn [n, k / 16]. global_scale, float32, is one for the matrix or
one for each of its rows. It is a multiplier; files that store its reciprocal say so.

There are two layouts of the codes. In files they are uint8 [n, k / 2], the even k in the lower nibble. For tensor cores
they are int32 [n / 8][k / (16·t)][32][t / 2], the tiles of ``int4_layout``, whose values from 0 to 15 are the codes: a
tile's 16 inputs are one block.
"""

from __future__ import annotations

import torch

from untorch.ops.int4_layout import K_TILE, N_TILE, pack_int4, unpack_int4
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "BLOCK_SIZE", "E2M1_MAX", "E2M1_VALUES", "dequantize_nvfp4", "e2m1_values", "pack_nvfp4", "pack_nvfp4_tiles",
    "unpack_nvfp4", "unpack_nvfp4_tiles",
]  # fmt: skip

BLOCK_SIZE = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0


def pack_nvfp4(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes from 0 to 15, integers [..., k] with k even, into uint8 [..., k / 2].

    The even k are in the low nibbles. Raises InvalidArgumentError.
    """
    if codes.dim() < 1 or codes.dtype.is_floating_point or codes.dtype.is_complex or codes.shape[-1] % 2:
        raise InvalidArgumentError(f"pack_nvfp4: codes: expected integers [..., k] with an even k, got {_kind(codes)}")
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) > 15):
        raise InvalidArgumentError(f"pack_nvfp4: codes: expected 0 to 15, got {int(codes.min())} to {int(codes.max())}")
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nvfp4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_nvfp4``: codes from 0 to 15, uint8 [..., k]. Raises InvalidArgumentError."""
    if packed.dim() < 1 or packed.dtype != torch.uint8:
        raise InvalidArgumentError(f"unpack_nvfp4: packed: expected uint8 [..., k / 2], got {_kind(packed)}")
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_nvfp4_tiles(packed: torch.Tensor, inner_k_tiles: int = 8) -> torch.Tensor:
    """The layout of files, uint8 [n, k / 2], to that of tensor cores, int32 [n / 8][k / (16·t)][32][t / 2].

    n must be a multiple of 8, and k of 16·inner_k_tiles: pad with zeros, whose block scales do not matter. Raises
    InvalidArgumentError.
    """
    width = K_TILE * inner_k_tiles
    if packed.dim() != 2 or packed.dtype != torch.uint8 or packed.shape[0] % N_TILE or 2 * packed.shape[1] % width:
        raise InvalidArgumentError(
            f"pack_nvfp4_tiles: packed: expected uint8 [n, k / 2] with n a multiple of {N_TILE} and k of {width} "
            f"(16 · inner_k_tiles), got {_kind(packed)}"
        )
    return pack_int4(unpack_nvfp4(packed), inner_k_tiles)


def unpack_nvfp4_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_nvfp4_tiles``: uint8 [n, k / 2]. Raises InvalidArgumentError."""
    return pack_nvfp4(unpack_int4(tiles))


def e2m1_values(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the codes, integers from 0 to 15, stand for, in ``dtype``."""
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.int()]


def dequantize_nvfp4(
    packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [..., n, k] that the three tensors stand for, in ``dtype``.

    packed: uint8 [..., n, k / 2], or int32 tiles [n / 8][k / (16·t)][32][t / 2].
    block_scale: float8_e4m3fn [..., n, k / 16].
    global_scale: float32 [...]: one for each matrix; or [..., n] or [..., 1]: one for each row.

    e2m1 · block_scale has six significant bits, so there is one rounding in float32, another in a narrower dtype, and
    none in float64. Raises InvalidArgumentError.
    """
    codes = unpack_int4(packed) if packed.dtype == torch.int32 else unpack_nvfp4(packed)
    if codes.dim() < 2 or codes.shape[-1] % BLOCK_SIZE:
        raise InvalidArgumentError(
            f"dequantize_nvfp4: packed: expected uint8 [..., n, k / 2] with k a multiple of {BLOCK_SIZE}, got "
            f"{_kind(packed)}"
        )
    *batch, n, k = codes.shape
    scales = (*batch, n, k // BLOCK_SIZE)
    if tuple(block_scale.shape) != scales or block_scale.dtype != torch.float8_e4m3fn:
        raise InvalidArgumentError(
            f"dequantize_nvfp4: block_scale: expected float8_e4m3fn {list(scales)}, got {_kind(block_scale)}"
        )
    wide = torch.promote_types(dtype, torch.float32)
    rows = rows_of_global_scale("dequantize_nvfp4", global_scale, (*batch, n)).to(wide)
    values = e2m1_values(codes, wide).reshape(*scales, BLOCK_SIZE) * block_scale.to(wide).unsqueeze(-1)
    weights: torch.Tensor = (values * rows[..., None, None]).flatten(-2).to(dtype)
    return weights


def rows_of_global_scale(function: str, global_scale: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """``global_scale``, one for each matrix or each row, as [*batch, n] or [*batch, 1], where ``rows`` is (*batch, n).

    Raises InvalidArgumentError, in the name of ``function``.
    """
    shape, batch = tuple(global_scale.shape), rows[:-1]
    if global_scale.dtype != torch.float32 or shape not in (batch, rows, (*batch, 1)):
        expected = " or ".join(str(list(each)) for each in (batch, (*batch, 1), rows))
        raise InvalidArgumentError(f"{function}: global_scale: expected float32 {expected}, got {_kind(global_scale)}")
    return global_scale.unsqueeze(-1) if shape == batch else global_scale


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
