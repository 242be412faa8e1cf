"""``untorch::w4a8_linear``: a linear layer of int4 weights in integers, W4A8, for CPUs.

y = x · Wᵀ + bias, where W [n, k] has w = (q − 8)·scale + zero, q from 0 to 15, as in ``untorch::int4_linear``. Each
part of 32 inputs of a row of x is quantised to int8 when the operator runs:

    v = round(x · (1 / s))    s = max|x| / 127 over the part    x ≈ v · s
    y = Σ over parts (Σ v·(q − 8) · scale + Σ v · zero) · s     the sums of a part in int32, exact

A row with a value that is not finite gives NaN.

libuntorch.so computes it, for torch's tensors as in files (``native``): with vpdpbusd where the CPU has VNNI, and with
the same integers elsewhere. The reference here gives the same integers. Where the CPU has AMX it multiplies 32 rows and
more in bfloat16: x and W are rounded to it, and sums are float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.int4 import GROUP_SIZES
from untorch.ops.w4a8_layout import W4A8_BLOCK, unpack_w4a8

__all__ = [
    "C_SHIM", "OPERATOR", "W4A8_PART", "check_operands", "quantize_parts", "w4a8_linear", "w4a8_linear_reference",
]  # fmt: skip

W4A8_PART = 32
_LEAST_SCALE = 2.0**-126
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_w4a8_linear(AtenTensorHandle x, AtenTensorHandle weight, "
    "AtenTensorHandle scale_and_zero, int64_t group_size, int64_t out_features, AtenTensorHandle* bias, "
    "AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::w4a8_linear", mutates_args=())
def w4a8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gives [..., out_features] in x's dtype, contiguous, for x [..., k].

    x: float32, bfloat16 or float16 (float64 in the reference), the last dimension contiguous.
    weight, scale_and_zero: as ``pack_w4a8`` gives them, for k rounded up to whole groups.
    group_size: 32, 64, 128 or 256.
    bias: [out_features] in x's dtype, or None.

    Raises ValueError.
    """
    _check(x, weight, scale_and_zero, group_size, out_features, bias)
    if x.device.type == "cpu" and native.serves("w4a8_linear", x):
        out = x.new_empty((*x.shape[:-1], out_features))
        native.call("w4a8_linear", out, x, weight, scale_and_zero, group_size, out_features, (bias,))
        return out
    return w4a8_linear_reference(x, weight, scale_and_zero, group_size, out_features, bias)


def w4a8_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator in torch's own operators, on any device, with the whole weight in float64."""
    values, scales = unpack_w4a8(weight, scale_and_zero, out_features)
    scale, zero = scales.double().permute(2, 1, 0).unsqueeze(-1)
    grouped = values.double().reshape(out_features, -1, group_size) - 8
    matrix = (grouped * scale + zero).reshape(values.shape)
    steps, part_scale = quantize_parts(x, values.shape[1])
    y: torch.Tensor = (steps.double() * part_scale.double()).flatten(-2) @ matrix.T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype).contiguous()


def quantize_parts(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator makes of x [..., at most k]: int8 [..., k / 32, 32] and float32 scales [..., k / 32, 1].

    The arithmetic is the kernel's, in float32. A scale is NaN where a value of its part is not finite.
    """
    padded = torch.nn.functional.pad(x.float(), (0, k - x.shape[-1]))
    parts = padded.reshape(*x.shape[:-1], k // W4A8_PART, W4A8_PART)
    finite = torch.isfinite(parts).all(-1, keepdim=True)
    clean = torch.where(finite, parts, 0.0)
    scale = (clean.abs().amax(-1, keepdim=True) / 127.0).clamp(min=_LEAST_SCALE)
    return (clean * (1.0 / scale)).round().to(torch.int8), scale.masked_fill(~finite, torch.nan)


@w4a8_linear.register_fake
def _w4a8_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(x, weight, scale_and_zero, group_size, out_features, bias)
    return x.new_empty((*x.shape[:-1], out_features))


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    out_features: int,
    bias: torch.Tensor | None,
) -> None:
    if group_size not in GROUP_SIZES:
        raise ValueError(f"w4a8_linear: group_size: expected 32, 64, 128 or 256, got {group_size}")
    panels, groups = -(-out_features // W4A8_BLOCK), -(-x.shape[-1] // group_size) if x.dim() else 0
    parts = 1 if scale_and_zero.dim() == 4 and scale_and_zero.shape[2] == 1 else 2
    expected = {
        "weight": (weight, (panels, groups * group_size // 8, W4A8_BLOCK), (torch.int32,)),
        "scale_and_zero": (scale_and_zero, (panels, groups, parts, W4A8_BLOCK), _SCALE_DTYPES),
        "bias": (bias, (out_features,), (x.dtype,)),
    }
    check_operands("w4a8_linear", x, expected)


def check_operands(
    operator: str,
    x: torch.Tensor,
    expected: Mapping[str, tuple[torch.Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]],
) -> None:
    """Of an operator with rows x: x, and by name a tensor or None, its shape, and dtypes. Raises ValueError."""
    if x.dim() < 1 or not x.dtype.is_floating_point:
        raise ValueError(f"{operator}: x: expected floating point [..., k], got {kind_of(x)}")
    stride = x.stride(-1)  # one that varies cannot be judged before the call
    if isinstance(stride, int) and stride != 1 and x.shape[-1] > 1:
        raise ValueError(f"{operator}: x: expected a contiguous last dimension, got the stride {stride}: copy it")
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        same = tensor.dim() == len(shape) and all(a == b for a, b in zip(tensor.shape, shape, strict=True))
        if not same or tensor.dtype not in dtypes or not tensor.is_contiguous():
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{operator}: {name}: expected contiguous {kinds} {list(shape)}, got {kind_of(tensor)}")
        if tensor.device != x.device:
            raise ValueError(f"{operator}: {name}: expected the device of x, {x.device}, got {tensor.device}")


OPERATOR = torch.ops.untorch.w4a8_linear.default
