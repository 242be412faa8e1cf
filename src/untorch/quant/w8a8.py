"""``W8A8Linear``: a linear layer for GPUs with 8-bit weights, int8 or FP8, in place of an nn.Linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.chunks import chunks
from untorch.ops.w8a8 import LARGEST, OPERATOR, SCALE_BLOCK, SIZE_STEP, block_scale_shape, dequantize_w8
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["DTYPES", "FP8_METHODS", "W8A8Linear", "padded_w8", "quantize_fp8"]

FP8_METHODS = ("rtn",)
DTYPES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


class W8A8Linear(nn.Module):
    """y = x · Wᵀ + b, W8A8: W is int8 or float8_e4m3fn; rows of x are rounded likewise when it is called.

    weight_values: [n, k], where n and k are out_features and in_features, padded to multiples of 16.
    scale: float32 [n], or for float8 one for 128 × 128 weights (``untorch.ops.w8a8.block_scale_shape``).
    bias: [n] in the dtype of the activations, or None.
    in_features, out_features: as nn.Linear has them.
    method: where the values come from, such as "rtn" or "compressed-tensors".

    Scales keep their dtype when the module is cast (``module.half()``). It has no attribute ``weight``: code that reads
    the weight of a linear layer must not take the quantised one for it.
    """

    weight_values: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        weight_values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        out_features: int,
        method: str,
    ) -> None:
        super().__init__()
        _check(weight_values, scale, bias, in_features, out_features)
        self.in_features, self.out_features, self.method = in_features, out_features, method
        self.register_buffer("weight_values", weight_values)
        self.register_buffer("scale", scale)
        n = weight_values.shape[0]
        if bias is not None and n != out_features:
            bias = nn.functional.pad(bias.detach(), (0, n - out_features))
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def from_values(
        cls, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, method: str
    ) -> W8A8Linear:
        """The layer of values [out_features, in_features] and float32 scales.

        scale: [out_features], or [⌈out_features / 128⌉, ⌈in_features / 128⌉]. Nothing is rounded. Raises
        InvalidArgumentError.
        """
        n, k = values.shape
        padded, scales = padded_w8(values, scale)
        return cls(padded, scales, bias, in_features=k, out_features=n, method=method)

    @property
    def dtype(self) -> str:
        """The weight's: "int8" or "fp8"."""
        return DTYPES[self.weight_values.dtype]

    @property
    def group_size(self) -> int:
        """The inputs that share a scale."""
        return self.in_features if self.scale.dim() == 1 else SCALE_BLOCK

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        if input.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"W8A8Linear: expected {self.in_features} features in the last dimension, got {tuple(input.shape)}"
            )
        x = input if statically_known_true(input.stride(-1) == 1) else input.contiguous()
        y: torch.Tensor = OPERATOR(x, self.weight_values, self.scale, self.bias)
        # A copy, as callers may take views that a slice does not allow.
        return y if y.shape[-1] == self.out_features else y[..., : self.out_features].contiguous()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [out_features, in_features] that this layer multiplies with."""
        return dequantize_w8(self.weight_values, self.scale, dtype)[: self.out_features, : self.in_features]

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the weight with its scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weight_values, self.scale))

    def extra_repr(self) -> str:
        """As nn.Linear, with the dtype of the weight, its scales and the method."""
        scales = "" if self.scale.dim() == 1 else f", scales of {SCALE_BLOCK} × {SCALE_BLOCK}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"dtype={self.dtype!r}, method={self.method!r}{scales}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W8A8Linear:
        """What ``to`` and ``half`` call: the weight and its scales move, and keep their dtypes."""
        kept = {"weight_values": self.weight_values, "scale": self.scale}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each output to nearest: float8_e4m3fn [n, k], and float32 scales [n], max|w| / 448.

    An output of zeros has the scale 0.
    """
    n, k = weight.shape
    values = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(n, dtype=torch.float32, device=weight.device)
    largest = LARGEST[torch.float8_e4m3fn]
    for rows in chunks(weight, k):
        part = weight[rows].float()
        scale = part.abs().amax(1) / largest
        scales[rows] = scale
        # Where max|w| is subnormal the scale may be 0, and so is then the output.
        steps = torch.where(scale.unsqueeze(1) == 0, 0.0, part / scale.unsqueeze(1))
        values[rows] = steps.clamp_(-largest, largest).to(torch.float8_e4m3fn)
    return values, scales


def padded_w8(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as ``W8A8Linear`` stores them: both sizes multiples of 16, zeros behind the weight."""
    n, k = values.shape
    rows, columns = (-(-size // SIZE_STEP) * SIZE_STEP for size in (n, k))
    if (rows, columns) != (n, k):
        # Not every device pads float8.
        bytes_ = nn.functional.pad(values.view(torch.uint8), (0, columns - k, 0, rows - n))
        values = bytes_.view(values.dtype)
    shape = (rows,) if scale.dim() == 1 else block_scale_shape(rows, columns)
    missing = [size for want, have in zip(reversed(shape), reversed(scale.shape), strict=True)
               for size in (0, want - have)]  # fmt: skip
    return values.contiguous(), nn.functional.pad(scale, missing).contiguous()


def _check(
    values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, in_features: int, out_features: int
) -> None:
    def kind(tensor: torch.Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    rows, columns = (-(-size // SIZE_STEP) * SIZE_STEP for size in (out_features, in_features))
    if values.dtype not in LARGEST or list(values.shape) != [rows, columns]:
        raise InvalidArgumentError(
            f"W8A8Linear: weight_values: expected int8 or float8_e4m3fn [{rows}, {columns}] for {in_features} → "
            f"{out_features} features, got {kind(values)}"
        )
    shapes: list[list[int]] = [[rows]]
    if values.dtype == torch.float8_e4m3fn:
        shapes.append(list(block_scale_shape(rows, columns)))
    if scale.dtype != torch.float32 or list(scale.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise InvalidArgumentError(f"W8A8Linear: scale: expected float32 {expected}, got {kind(scale)}")
    if bias is not None and list(bias.shape) != [out_features]:
        raise InvalidArgumentError(f"W8A8Linear: bias: expected [{out_features}], got {kind(bias)}")
