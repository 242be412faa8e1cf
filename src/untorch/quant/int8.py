"""int8 weights with a scale an output: rounding to nearest, and ``Int8Linear``, which multiplies in integers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from untorch.ops import native
from untorch.ops.chunks import chunks
from untorch.ops.int8 import OPERATOR
from untorch.ops.int8_layout import INT8_BLOCK, INT8_GROUP, pack_int8, padded_outputs, unpack_int8
from untorch.quant.methods import has_kernel, relative_norm
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["INT8_METHODS", "Int8Linear", "int8_error", "quantize_int8", "quantize_int8_error"]

INT8_METHODS = ("rtn",)
_LARGEST = 127
INPUT_RANGES = ("asymmetric", "symmetric", "static", "tensor")


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each output to nearest: int8 [n, k] from −127 to 127, and float32 scales [n], max|w| / 127.

    An output of zeros has the scale 0.
    """
    return _quantize(weight)[:2]


def quantize_int8_error(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """As ``quantize_int8``, with the relative error as ``int8_error``."""
    values, scales, sums = _quantize(weight)
    if sums is None:
        return values, scales, int8_error(weight, values, scales)
    return values, scales, relative_norm(*sums.sum(0).tolist())


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """On CPUs by a kernel of libuntorch.so (``native/kernels/cpu/quantize``), which also gives the squares' sums."""
    if not has_kernel(weight):
        return (*quantize_int8_reference(weight), None)
    n, k = weight.shape
    values, scales = torch.empty((n, k), dtype=torch.int8), torch.empty(n)
    sums = torch.empty((n, 2), dtype=torch.float64)
    native.call("quantize_int8", values, scales, sums, weight.detach())
    return values, scales, sums


def quantize_int8_reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize_int8``, by torch's operators."""
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
    return relative_norm(wrong, whole)


class Int8Linear(nn.Module):
    """y = x · Wᵀ + b in integers, W8A8: W is int8 with a scale an output; rows of x are quantised when it is called.

    packed_weight: int8 [n / 16][k / 4][16][4] (``untorch.ops.int8_layout``), where n and k are padded.
    scale: float32 [n], or [groups, n] with a scale for each k / groups inputs; column_sums: int32, the sums of the
        outputs' weights, shaped alike.
    bias: [out_features] in the dtype of the activations, or None.
    in_features, out_features: as nn.Linear has them.
    method: where the values come from, such as "rtn".
    input_range: how x is quantised: rows "asymmetric" or "symmetric", all of it "static" or "tensor"
        (``untorch.ops.int8``), with input_scale and input_zero.
    weight_zero: float32 [n, groups], or None for a symmetric weight: zero points times −scale, which the sums of the
        inputs of a group are multiplied by, in floating point.
    input_factor: [in_features] in the dtype of the activations, or None: what x is multiplied by before it is
        quantised, 1 / s of SmoothQuant; the weight was multiplied by s.

    It has no attribute ``weight``: code that reads the weight of a linear layer must not take the packed one for it.
    """

    packed_weight: torch.Tensor
    scale: torch.Tensor
    column_sums: torch.Tensor
    bias: torch.Tensor | None
    input_factor: torch.Tensor | None
    weight_zero: torch.Tensor | None

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
        input_scale: float = 0.0,
        input_zero: int = 0,
        weight_zero: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        _check(packed_weight, scale, column_sums, bias, in_features, out_features)
        if input_range not in INPUT_RANGES:
            known = ", ".join(repr(name) for name in INPUT_RANGES)
            raise InvalidArgumentError(f"Int8Linear: input_range: expected one of {known}, got {input_range!r}")
        self.in_features, self.out_features = in_features, out_features
        self.method, self.input_range = method, input_range
        self.input_scale, self.input_zero = input_scale, input_zero
        self.register_buffer("packed_weight", packed_weight)
        self.register_buffer("scale", scale)
        self.register_buffer("column_sums", column_sums)
        self.register_buffer("bias", None if bias is None else bias.detach())
        if input_factor is not None and list(input_factor.shape) != [in_features]:
            raise InvalidArgumentError(
                f"Int8Linear: input_factor: expected [{in_features}], got {list(input_factor.shape)}"
            )
        self.register_buffer("input_factor", input_factor)
        groups = scale.shape[0] if scale.dim() == 2 else 1
        if weight_zero is not None and list(weight_zero.shape) != [out_features, groups]:
            raise InvalidArgumentError(
                f"Int8Linear: weight_zero: expected {[out_features, groups]}, got {list(weight_zero.shape)}"
            )
        self.register_buffer("weight_zero", weight_zero)

    @classmethod
    def from_values(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        method: str,
        input_range: str = "asymmetric",
        input_scale: float = 0.0,
        input_zero: int = 0,
        zero_point: torch.Tensor | None = None,
    ) -> Int8Linear:
        """The layer of int8 values [out_features, in_features] and scales [out_features] or [out_features, groups].

        zero_point: of the weight, shaped as scales: it is (values − zero_point)·scales. Values and scales are not
        rounded. Raises InvalidArgumentError.
        """
        groups = scales.shape[1] if scales.dim() == 2 else 1
        packed, sums = pack_int8(values, groups if groups > 1 else None)
        steps = scales.float().reshape(len(scales), groups)
        zero = None
        if zero_point is not None and bool(zero_point.any()):
            zero = -zero_point.float().reshape(steps.shape) * steps
        padded = pad_scales(steps.T)
        return cls(
            packed, padded if groups > 1 else padded[0], sums, bias, in_features=values.shape[1],
            out_features=values.shape[0], method=method, input_range=input_range, input_scale=input_scale,
            input_zero=input_zero, weight_zero=zero,
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        if input.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"Int8Linear: expected {self.in_features} features in the last dimension, got {tuple(input.shape)}"
            )
        x = input if self.input_factor is None else input * self.input_factor
        shifted = None
        if self.weight_zero is not None:
            sums = x.float().reshape(*x.shape[:-1], self.weight_zero.shape[1], -1).sum(-1)
            shifted = nn.functional.linear(sums, self.weight_zero).to(x.dtype)
        y: torch.Tensor = OPERATOR(
            x, self.packed_weight, self.scale, self.column_sums, self.bias, shifted, "none", self.out_features,
            self.input_range, self.input_scale, self.input_zero,
        )  # fmt: skip
        return y

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.in_features // (self.scale.shape[0] if self.scale.dim() == 2 else 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [out_features, in_features] that this layer multiplies its input with."""
        values = unpack_int8(self.packed_weight, self.out_features, self.in_features)
        scales = self.scale.reshape(-1, self.scale.shape[-1])[:, : self.out_features].T
        weight = values.float() * scales.repeat_interleave(self.group_size, 1)
        if self.weight_zero is not None:
            weight = weight + self.weight_zero.repeat_interleave(self.group_size, 1)
        return (weight if self.input_factor is None else weight * self.input_factor.float()).to(dtype)

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed weight with its scales, sums and zero points."""
        tensors = (self.packed_weight, self.scale, self.column_sums, self.weight_zero)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def extra_repr(self) -> str:
        """As nn.Linear, with the method."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"method={self.method!r}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8Linear:
        """What ``to`` and ``bfloat16`` call: scales and zero points move, and stay in float32."""
        before = self.scale, self.weight_zero
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != before[0].dtype:
            self.scale = before[0].to(self.scale.device)
            if before[1] is not None:
                self.weight_zero = before[1].to(self.scale.device)
        return self


def pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] up to whole panels."""
    return nn.functional.pad(scales.float(), (0, padded_outputs(scales.shape[-1]) - scales.shape[-1])).contiguous()


def _check(
    packed_weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
) -> None:
    rows = padded_outputs(out_features)
    outputs = [rows] if scale.dim() != 2 else [scale.shape[0], rows]
    expected = {
        "packed_weight": (
            packed_weight, torch.int8, [rows // INT8_BLOCK, -(-in_features // INT8_GROUP), INT8_BLOCK, INT8_GROUP],
        ),
        "scale": (scale, torch.float32, outputs),
        "column_sums": (column_sums, torch.int32, outputs),
    }  # fmt: skip
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise InvalidArgumentError(
                f"Int8Linear: {name}: expected {str(dtype).removeprefix('torch.')} {shape} for {in_features} → "
                f"{out_features} features, got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
    if bias is not None and list(bias.shape) != [out_features]:
        raise InvalidArgumentError(f"Int8Linear: bias: expected [{out_features}], got {list(bias.shape)}")
