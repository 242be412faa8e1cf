"""int8 weights with a scale an output: rounding to nearest, and ``Int8Linear``, which multiplies in integers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from untorch.ops.int8 import OPERATOR
from untorch.ops.int8_layout import INT8_BLOCK, INT8_GROUP, pack_int8, padded_outputs, unpack_int8
from untorch.quant.methods import chunks
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["INT8_METHODS", "Int8Linear", "int8_error", "quantize_int8"]

INT8_METHODS = ("rtn",)
_LARGEST = 127
INPUT_RANGES = ("asymmetric", "symmetric")


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each output to nearest: int8 [n, k] from −127 to 127, and float32 scales [n], max|w| / 127.

    An output of zeros has the scale 0.
    """
    n, k = weight.shape
    values = torch.empty((n, k), dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, dtype=torch.float32, device=weight.device)
    for rows in chunks(weight, k):
        part = weight[rows].float()
        scale = part.abs().amax(1) / _LARGEST
        scales[rows] = scale
        # Where max|w| is subnormal the scale may be 0, and so is then the output.
        steps = torch.where(scale.unsqueeze(1) == 0, 0.0, part / scale.unsqueeze(1))
        values[rows] = steps.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return values, scales


def int8_error(weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> float:
    """‖W' − W‖ / ‖W‖ over all weights (Frobenius norms, summed in float64); 0 where both are 0."""
    wrong, whole = 0.0, 0.0
    for rows in chunks(weight, weight.shape[1]):
        part = weight[rows].float()
        difference = values[rows].float() * scales[rows].unsqueeze(1) - part
        wrong += float(difference.double().square_().sum())
        whole += float(part.double().square_().sum())
    return float((wrong / whole) ** 0.5) if whole else 0.0 if not wrong else float("inf")


class Int8Linear(nn.Module):
    """y = x · Wᵀ + b in integers, W8A8: W is int8 with a scale an output; rows of x are quantised when it is called.

    packed_weight: int8 [n / 16][k / 4][16][4] (``untorch.ops.int8_layout``), where n and k are padded.
    scale: float32 [n]; column_sums: int32 [n], the sums of the outputs' weights.
    bias: [out_features] in the dtype of the activations, or None.
    in_features, out_features: as nn.Linear has them.
    method: where the values come from, such as "rtn".
    input_range: how rows of x are quantised, "asymmetric" or "symmetric" (``untorch.ops.int8``).
    input_factor: [in_features] in the dtype of the activations, or None: what x is multiplied by before it is
        quantised, 1 / s of SmoothQuant; the weight was multiplied by s.

    It has no attribute ``weight``: code that reads the weight of a linear layer must not take the packed one for it.
    """

    packed_weight: torch.Tensor
    scale: torch.Tensor
    column_sums: torch.Tensor
    bias: torch.Tensor | None
    input_factor: torch.Tensor | None

    def __init__(
        self,
        packed_weight: torch.Tensor,
        scale: torch.Tensor,
        column_sums: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        out_features: int,
        method: str,
        input_range: str = "asymmetric",
        input_factor: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        _check(packed_weight, scale, column_sums, bias, in_features, out_features)
        if input_range not in INPUT_RANGES:
            known = ", ".join(repr(name) for name in INPUT_RANGES)
            raise InvalidArgumentError(f"Int8Linear: input_range: expected one of {known}, got {input_range!r}")
        self.in_features, self.out_features = in_features, out_features
        self.method, self.input_range = method, input_range
        self.register_buffer("packed_weight", packed_weight)
        self.register_buffer("scale", scale)
        self.register_buffer("column_sums", column_sums)
        self.register_buffer("bias", None if bias is None else bias.detach())
        if input_factor is not None and list(input_factor.shape) != [in_features]:
            raise InvalidArgumentError(
                f"Int8Linear: input_factor: expected [{in_features}], got {list(input_factor.shape)}"
            )
        self.register_buffer("input_factor", input_factor)

    @classmethod
    def from_values(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        method: str,
        input_range: str = "asymmetric",
    ) -> Int8Linear:
        """The layer of int8 values [out_features, in_features] and their scales [out_features].

        Nothing is rounded. Raises InvalidArgumentError.
        """
        packed, sums = pack_int8(values)
        return cls(
            packed, pad_scales(scales), sums, bias, in_features=values.shape[1], out_features=values.shape[0],
            method=method, input_range=input_range,
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        if input.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"Int8Linear: expected {self.in_features} features in the last dimension, got {tuple(input.shape)}"
            )
        x = input if self.input_factor is None else input * self.input_factor
        y: torch.Tensor = OPERATOR(
            x, self.packed_weight, self.scale, self.column_sums, self.bias, None, "none", self.out_features,
            self.input_range, 0.0, 0,
        )  # fmt: skip
        return y

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [out_features, in_features] that this layer multiplies its input with."""
        values = unpack_int8(self.packed_weight, self.out_features, self.in_features)
        weight = values.float() * self.scale[: self.out_features].unsqueeze(1)
        return (weight if self.input_factor is None else weight * self.input_factor.float()).to(dtype)

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed weight with its scales and sums."""
        return sum(t.numel() * t.element_size() for t in (self.packed_weight, self.scale, self.column_sums))

    def extra_repr(self) -> str:
        """As nn.Linear, with the method."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"method={self.method!r}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8Linear:
        """What ``to`` and ``bfloat16`` call: scales move, and stay in float32."""
        before = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != before.dtype:
            self.scale = before.to(self.scale.device)
        return self


def pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """float32 [n] up to whole panels."""
    return nn.functional.pad(scales.float(), (0, padded_outputs(scales.shape[0]) - scales.shape[0]))


def _check(
    packed_weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
) -> None:
    rows = padded_outputs(out_features)
    expected = {
        "packed_weight": (
            packed_weight, torch.int8, [rows // INT8_BLOCK, -(-in_features // INT8_GROUP), INT8_BLOCK, INT8_GROUP],
        ),
        "scale": (scale, torch.float32, [rows]),
        "column_sums": (column_sums, torch.int32, [rows]),
    }  # fmt: skip
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise InvalidArgumentError(
                f"Int8Linear: {name}: expected {str(dtype).removeprefix('torch.')} {shape} for {in_features} → "
                f"{out_features} features, got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
    if bias is not None and list(bias.shape) != [out_features]:
        raise InvalidArgumentError(f"Int8Linear: bias: expected [{out_features}], got {list(bias.shape)}")
