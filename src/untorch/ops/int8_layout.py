"""The layout of int8 weights for integer dot products: packing it from plain values, and its inverse, with torch alone.

A weight [n, k] becomes int8 [ceil(n / 16)][ceil(k / 4)][16][4], zeros behind n and k:

    packed[j, g, i, b] = W[16·j + i, 4·g + b]

Four neighbours of k fill one 32-bit lane, which is what ``vpdpbusd`` (VNNI) multiplies; 16 outputs beside each other
are one vector of AVX-512 or two of AVX2. A panel of 16 outputs is read from memory in order. One file serves all CPUs.
"""

from __future__ import annotations

import torch

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["INT8_BLOCK", "INT8_GROUP", "INT8_MAX_K", "pack_int8", "padded_outputs", "unpack_int8"]

INT8_BLOCK = 16
INT8_GROUP = 4
# The largest k whose sums of uint8 · int8 fit int32.
INT8_MAX_K = 65536


def padded_outputs(n: int) -> int:
    """n up to whole panels."""
    return -(-n // INT8_BLOCK) * INT8_BLOCK


def pack_int8(values: torch.Tensor, groups: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs int8 [n, k]; gives the packed weight, and int32 [16·ceil(n / 16)], the sums of the outputs' weights.

    The sums correct for the zero points of activations: Σ (u − zero)·w = Σ u·w − zero·Σ w. With ``groups``, which
    divide k into multiples of 4, they are [groups, 16·ceil(n / 16)]. Raises InvalidArgumentError.
    """
    if values.dim() != 2 or values.dtype != torch.int8 or values.shape[1] > INT8_MAX_K:
        raise InvalidArgumentError(
            f"pack_int8: values: expected int8 [n, k] with k at most {INT8_MAX_K}, got {values.dtype} "
            f"{tuple(values.shape)}"
        )
    n, k = values.shape
    if groups is not None and (groups < 1 or k % (INT8_GROUP * groups)):
        raise InvalidArgumentError(
            f"pack_int8: groups: expected a number that divides {k} inputs into multiples of {INT8_GROUP}, got {groups}"
        )
    rows, words = padded_outputs(n), -(-k // INT8_GROUP)
    padded = values.new_zeros((rows, words * INT8_GROUP))
    padded[:n, :k] = values
    packed = padded.reshape(rows // INT8_BLOCK, INT8_BLOCK, words, INT8_GROUP).transpose(1, 2).contiguous()
    if groups is None:
        return packed, padded.sum(1, dtype=torch.int32)
    return packed, padded.reshape(rows, groups, -1).sum(2, dtype=torch.int32).T.contiguous()


def unpack_int8(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of ``pack_int8``: int8 [out_features, in_features]. Raises InvalidArgumentError."""
    if packed.dim() != 4 or packed.dtype != torch.int8 or tuple(packed.shape[2:]) != (INT8_BLOCK, INT8_GROUP):
        raise InvalidArgumentError(
            f"unpack_int8: packed: expected int8 [n / 16][k / 4][16][4], got {packed.dtype} {tuple(packed.shape)}"
        )
    rows = packed.transpose(1, 2).reshape(packed.shape[0] * INT8_BLOCK, packed.shape[1] * INT8_GROUP)
    return rows[:out_features, :in_features]
