"""``untorch::int8_linear``: a linear layer in integers, W8A8, for CPUs.

y = activation(x · Wᵀ + bias) + residual, where W [n, k] is scale · q with int8 q and a scale an output. Each row of x
is quantised to uint8 u with a scale and a zero point when the operator runs:

    u = clamp(round(x · (1 / s)) + zero, 0, 255)        x ≈ (u − zero) · s
    y = (Σ u·q − zero · Σ q) · s · scale + bias          the sums in int32, exact

``input_range`` says where s and zero come from:

    "asymmetric"  s = max(x)/255 − min(x)/255 over the row and 0, zero = round(−min(x) / s)
    "symmetric"   s = max|x| / 127, zero = 128
    "static"      input_scale and input_zero, for all rows
    "tensor"      s = max((max(x) − min(x)) / 255, input_scale) over all rows and 0, zero = −round(min(x) / s), as
                  PyTorch's choose_qparams has it

A row with a value that is not finite gives NaN, with "tensor" all rows do. With "static" only NaN does, and infinities
saturate.

W may have a scale for each k / groups neighbours of k: scale and column_sums are then [groups, padded n]. The sums of a
group are exact; those of the groups are added in float32.

libuntorch.so computes it, for torch's tensors as in files (``native``): with vpdpbusd where the CPU has VNNI, and with
the same sums elsewhere. The reference here gives the same integers.
"""

from __future__ import annotations

import torch

from untorch.ops import native
from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.describe import kind_of
from untorch.ops.int8_layout import INT8_BLOCK, INT8_GROUP, INT8_MAX_K, padded_outputs, unpack_int8

__all__ = ["C_SHIM", "INPUT_RANGES", "OPERATOR", "int8_linear", "int8_linear_reference", "quantize_activations"]

INPUT_RANGES = ("asymmetric", "symmetric", "static", "tensor")
_LEAST_SCALE = 2.0**-126

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_int8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, "
    "AtenTensorHandle column_sums, AtenTensorHandle* bias, AtenTensorHandle* residual, const char* activation, "
    "int64_t out_features, const char* input_range, double input_scale, int64_t input_zero, AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::int8_linear", mutates_args=())
def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
    input_range: str,
    input_scale: float,
    input_zero: int,
) -> torch.Tensor:
    """Gives [..., out_features] in x's dtype, contiguous, for x [..., k].

    x: float32, bfloat16 or float16 (float64 in the reference), k at most 65536.
    weight, column_sums: as ``pack_int8`` gives them.
    scale: float32 [16·ceil(n / 16)], or [groups, 16·ceil(n / 16)]; column_sums alike. k is a multiple of 4·groups.
    bias: [out_features] in x's dtype, or None. residual: [..., out_features] in x's dtype, or None.
    activation: a name of ``untorch.ops.activations``.
    input_range: "asymmetric", "symmetric", "static" or "tensor".
    input_scale, input_zero: for "static": above 0, and 0 to 255. For "tensor" input_scale is the least scale, at least
        2^-126. Otherwise not read.

    Raises ValueError.
    """
    _check(
        x, weight, scale, column_sums, bias, residual, activation, out_features, input_range, input_scale, input_zero
    )
    if x.device.type == "cpu" and native.serves("int8_linear", x):
        out = x.new_empty((*x.shape[:-1], out_features))
        native.call(
            "int8_linear", out, x, weight, scale, column_sums, (bias,), (residual,), native.Text(activation.encode()),
            out_features, native.Text(input_range.encode()), float(input_scale), input_zero,
        )  # fmt: skip
        return out
    return int8_linear_reference(
        x, weight, scale, column_sums, bias, residual, activation, out_features, input_range, input_scale, input_zero
    )


def int8_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
    input_range: str,
    input_scale: float,
    input_zero: int,
) -> torch.Tensor:
    """The operator in torch's own operators, on any device. Sums are in float64, which holds them exactly."""
    values, row_scale, zero = quantize_activations(x, input_range, input_scale, input_zero)
    matrix = unpack_int8(weight, out_features, x.shape[-1])
    centred = values.double() - zero.double()
    if scale.dim() == 1:
        y = (centred @ matrix.double().T).float() * (row_scale * scale[:out_features])
    else:
        groups = len(scale)
        y = torch.zeros((), device=x.device)
        for group in range(groups):
            part = slice(group * x.shape[-1] // groups, (group + 1) * x.shape[-1] // groups)
            sums = centred[..., part] @ matrix[:, part].double().T
            y = y + sums.float() * (row_scale * scale[group, :out_features])
    if bias is not None:
        y = y + bias.float()
    y = activate(y, activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype).contiguous()


def quantize_activations(
    x: torch.Tensor, input_range: str, input_scale: float = 0.0, input_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator makes of x [..., k]: u uint8 [..., k], s float32 [..., 1] and zero int32 [..., 1].

    The arithmetic is the kernel's, in float32; its results are the same bytes. s is NaN where the results are NaN.
    """
    x = x.float()
    padded = torch.nn.functional.pad(x, (0, 1))  # every range holds 0
    finite = torch.isfinite(padded).all(-1, keepdim=True)
    clean = torch.where(finite, padded, 0.0)
    if input_range == "static":
        scale = torch.full_like(clean[..., :1], input_scale)
        scale_or_nan = scale.masked_fill(torch.isnan(padded).any(-1, keepdim=True), torch.nan)
        zero = torch.full_like(scale, input_zero, dtype=torch.int32)
        values = padded.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    elif input_range == "tensor":
        low, high = padded.min(), padded.max()
        scale = ((high - low) / 255.0).clamp(min=input_scale)
        finite = torch.isfinite(low) & torch.isfinite(high) & torch.isfinite(scale)
        scale = torch.where(finite, scale, 1.0).expand_as(clean[..., :1])
        scale_or_nan = torch.where(finite, scale, torch.nan)
        zero = (-torch.round(torch.where(finite, low, 0.0) / scale)).clamp(max=255).to(torch.int32)
        values = torch.where(finite, clean, 0.0)
    else:
        low, high = clean.amin(-1, keepdim=True), clean.amax(-1, keepdim=True)
        if input_range == "symmetric":
            scale = (torch.maximum(high, -low) / 127.0).clamp(min=_LEAST_SCALE)
            zero = torch.full_like(scale, 128, dtype=torch.int32)
        else:
            scale = (high / 255.0 - low / 255.0).clamp(min=_LEAST_SCALE)
            zero = (-low * (1.0 / scale)).round().clamp(max=255).to(torch.int32)
        scale_or_nan = scale.masked_fill(~finite, torch.nan)
        values = clean
    steps = (values * (1.0 / scale)).clamp(-256, 256).round()
    return (steps + zero).clamp(0, 255).to(torch.uint8)[..., :-1], scale_or_nan, zero


@int8_linear.register_fake
def _int8_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
    input_range: str,
    input_scale: float,
    input_zero: int,
) -> torch.Tensor:
    _check(
        x, weight, scale, column_sums, bias, residual, activation, out_features, input_range, input_scale, input_zero
    )
    return x.new_empty((*x.shape[:-1], out_features))


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
    input_range: str,
    input_scale: float,
    input_zero: int,
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"int8_linear: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if input_range not in INPUT_RANGES:
        raise ValueError(f"int8_linear: input_range: expected one of {', '.join(INPUT_RANGES)}, got {input_range!r}")
    if input_range == "static" and not 0 < input_scale < float("inf"):
        raise ValueError(f"int8_linear: input_scale: expected a finite number above 0, got {input_scale}")
    if input_range == "static" and not 0 <= input_zero <= 255:
        raise ValueError(f"int8_linear: input_zero: expected 0 to 255, got {input_zero}")
    if input_range == "tensor" and not _LEAST_SCALE <= input_scale < float("inf"):
        raise ValueError(
            f"int8_linear: input_scale, the least scale: expected at least 2^-126 and finite, got {input_scale}"
        )
    if x.dim() < 1 or not x.dtype.is_floating_point or x.shape[-1] > INT8_MAX_K:
        raise ValueError(f"int8_linear: x: expected floating point [..., k], k at most {INT8_MAX_K}, got {kind_of(x)}")
    rows = padded_outputs(out_features)
    packed = (rows // INT8_BLOCK, -(-x.shape[-1] // INT8_GROUP), INT8_BLOCK, INT8_GROUP)
    _expect("weight", weight, packed, torch.int8)
    sizes: tuple[int, ...] = (rows,)
    if scale.dim() == 2:
        sizes = (scale.shape[0], rows)
        if not sizes[0] or x.shape[-1] % (INT8_GROUP * sizes[0]):
            raise ValueError(
                f"int8_linear: scale: {sizes[0]} groups do not divide {x.shape[-1]} features into multiples of "
                f"{INT8_GROUP}"
            )
    _expect("scale", scale, sizes, torch.float32)
    _expect("column_sums", column_sums, sizes, torch.int32)
    if bias is not None:
        _expect("bias", bias, (out_features,), x.dtype)
    if residual is not None:
        _expect("residual", residual, (*x.shape[:-1], out_features), x.dtype)
    operands = {"weight": weight, "scale": scale, "column_sums": column_sums, "bias": bias, "residual": residual}
    for name, tensor in operands.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"int8_linear: {name}: expected the device of x, {x.device}, got {tensor.device}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    same = tensor.dim() == len(shape) and all(a == b for a, b in zip(tensor.shape, shape, strict=True))
    if not same or tensor.dtype != dtype:
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise ValueError(f"int8_linear: {name}: expected {wanted}, got {kind_of(tensor)}")


OPERATOR = torch.ops.untorch.int8_linear.default
