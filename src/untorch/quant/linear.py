"""``Int4Linear``: a linear layer with a weight in int4, in place of an nn.Linear."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.int4 import GROUP_SIZES, OPERATOR, dequantize_int4
from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, LANES, N_TILE
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Int4Linear", "padded_features"]

# The widest of the layout: a lane reads 16 bytes at once.
_K_MULTIPLE = INNER_K_TILES[-1] * K_TILE


def padded_features(in_features: int, out_features: int, group_size: int) -> tuple[int, int]:
    """(n, k) of the packed weight: n a multiple of 8, k of 128 and of the group."""
    k_multiple = max(_K_MULTIPLE, group_size)
    return -(-out_features // N_TILE) * N_TILE, -(-in_features // k_multiple) * k_multiple


class Int4Linear(nn.Module):
    """y = x · Wᵀ + b with W in four bits: w = (q − 8)·scale + zero, scale and zero for each group of inputs.

    packed_weight: int32 [n / 8][k / (16·t)][32][t / 2] (``untorch.quant.pack_int4``), where n and k are out_features
        and in_features, padded.
    scale_and_zero: bfloat16, float16 or float32 [k / group_size][n][2].
    bias: [out_features] in the dtype of the activations, or None.
    in_features, out_features: as nn.Linear has them.
    group_size: 32, 64, 128 or 256.
    method: where the values come from, such as "hqq" or "gptq".

    It has no attribute ``weight``: code that reads the weight of a linear layer must not take the packed one for it.
    """

    packed_weight: torch.Tensor
    scale_and_zero: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        packed_weight: torch.Tensor,
        scale_and_zero: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        out_features: int,
        group_size: int,
        method: str,
    ) -> None:
        super().__init__()
        _check(packed_weight, scale_and_zero, bias, in_features, out_features, group_size)
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.method = group_size, method
        self.register_buffer("packed_weight", packed_weight)
        self.register_buffer("scale_and_zero", scale_and_zero)
        n = packed_weight.shape[0] * N_TILE
        if bias is not None and n != out_features:
            bias = nn.functional.pad(bias.detach(), (0, n - out_features))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        if input.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"Int4Linear: expected {self.in_features} features in the last dimension, got {tuple(input.shape)}"
            )
        x = input if statically_known_true(input.stride(-1) == 1) else input.contiguous()
        y: torch.Tensor = OPERATOR(x, self.packed_weight, self.scale_and_zero, self.group_size, self.bias)
        # A copy, as callers may take views that a slice does not allow.
        return y if y.shape[-1] == self.out_features else y[..., : self.out_features].contiguous()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [out_features, in_features] that this layer multiplies with."""
        weight = dequantize_int4(self.packed_weight, self.scale_and_zero, self.group_size, dtype)
        return weight[: self.out_features, : self.in_features]

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed weight with its scales and zeros."""
        return sum(t.numel() * t.element_size() for t in (self.packed_weight, self.scale_and_zero))

    def extra_repr(self) -> str:
        """As nn.Linear, with the group size and the method."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}, method={self.method!r}"
        )


def _check(
    packed_weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
) -> None:
    if group_size not in GROUP_SIZES:
        raise InvalidArgumentError(f"Int4Linear: group_size: expected 32, 64, 128 or 256, got {group_size!r}")
    shape = tuple(packed_weight.shape)
    if packed_weight.dtype != torch.int32 or len(shape) != 4 or shape[2] != LANES or 2 * shape[3] not in INNER_K_TILES:
        raise InvalidArgumentError(
            f"Int4Linear: packed_weight: expected int32 [n / 8][k / (16 · inner_k_tiles)][32][inner_k_tiles / 2], got "
            f"{packed_weight.dtype} {shape}"
        )
    n, k = shape[0] * N_TILE, shape[1] * shape[3] * 2 * K_TILE
    if not (n - N_TILE < out_features <= n) or not (0 < in_features <= k) or k % group_size:
        raise InvalidArgumentError(
            f"Int4Linear: packed_weight: it holds {n} × {k} values, which do not fit {out_features} × {in_features} "
            f"features in groups of {group_size}"
        )
    if tuple(scale_and_zero.shape) != (k // group_size, n, 2) or not scale_and_zero.dtype.is_floating_point:
        raise InvalidArgumentError(
            f"Int4Linear: scale_and_zero: expected floating point {(k // group_size, n, 2)}, got "
            f"{scale_and_zero.dtype} {tuple(scale_and_zero.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise InvalidArgumentError(f"Int4Linear: bias: expected {(out_features,)}, got {tuple(bias.shape)}")
