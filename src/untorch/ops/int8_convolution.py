"""``untorch::int8_convolution``: a 2-D convolution in integers, W8A8, for CPUs, channels last.

The weight [O, C/groups, kh, kw] is scale · q with int8 q and a scale an output channel. Activations are uint8 with a
scale and a zero point, x ≈ (u − zero) · s, and S = Σ (u − zero) · q is exact in int32. ``input_range`` says how a
float32 input becomes uint8:

    "asymmetric"  by the range of each image and 0, "symmetric" by its largest magnitude, as ``int8_linear`` does a row
    "static"      by input_scale and input_zero; a uint8 input has these already
    "tensor"      by the range of all images and 0, with input_scale as the least scale

A float32 result is activation(S · (s · scale) + bias) + residual, or with the residual sum first. With an output_scale
the result is uint8 for the next layer. Where the activation is a clamp ("none", "relu", "relu6") it is computed in
steps of the output scale:

    t = S · (s · scale / s_out) + bias / s_out [+ (r − residual_zero) · (residual_scale / s_out)]
    u = clamp(round(clamp(t)) + output_zero, 0, 255)

Each operation is rounded apart, so the bytes are the same on every CPU. Other activations are computed in float32, and
u = clamp(round(y · (1 / s_out)) + output_zero, 0, 255).

libuntorch.so computes it (``native``): with vpdpbusd where the CPU has VNNI, and with the same sums elsewhere. As with
``packed_convolution`` results are row-major in a traced graph, and Inductor's lowering makes them channels last.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops import native
from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.describe import kind_of
from untorch.ops.int8 import INPUT_RANGES, quantize_activations
from untorch.ops.int8_layout import INT8_BLOCK, INT8_GROUP, INT8_MAX_K, padded_outputs
from untorch.ops.packed_convolution import is_depthwise

__all__ = [
    "C_SHIM",
    "MAX_DEPTHWISE_TAPS",
    "OPERATOR",
    "int8_convolution",
    "int8_convolution_reference",
    "pack_int8_convolution",
    "pad_channels",
    "register_lowering",
    "unpack_int8_convolution",
]

MAX_DEPTHWISE_TAPS = 256
_CLAMPS = {"none": (-512.0, 512.0), "relu": (0.0, 512.0), "relu6": (0.0, 6.0)}

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_int8_convolution(AtenTensorHandle x, AtenTensorHandle weight, "
    "AtenTensorHandle scale, AtenTensorHandle column_sums, AtenTensorHandle* bias, AtenTensorHandle* residual, "
    "int64_t out_channels, const int64_t* kernel, int64_t kernel_len_, const int64_t* stride, int64_t stride_len_, "
    "const int64_t* padding, int64_t padding_len_, const int64_t* dilation, int64_t dilation_len_, int64_t groups, "
    "const char* activation, int32_t residual_first, const char* input_range, double input_scale, int64_t input_zero, "
    "double residual_scale, int64_t residual_zero, double output_scale, int64_t output_zero, int32_t channels_last, "
    'AtenTensorHandle* ret0) __asm__("aoti_torch_cpu_untorch_int8_convolution")'
)


def pad_channels(values: torch.Tensor, groups: int, depthwise: bool) -> torch.Tensor:
    """[O] with each group up to whole panels of 16, as the operator reads scales and sums."""
    rows = values.reshape(1 if depthwise else groups, -1)
    return F.pad(rows, (0, padded_outputs(rows.shape[1]) - rows.shape[1])).reshape(-1).contiguous()


def pack_int8_convolution(values: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs int8 [O, C/groups, kh, kw]; gives the packed weight, and int32 sums of the outputs' weights, padded.

    The weight becomes [groups][ceil(o / 16)][kh · kw · ceil(c / 4)][16][4], four channels in a word, for o = O/groups
    and c = C/groups; of a depthwise convolution [1][ceil(C / 16)][ceil(kh · kw / 4)][16][4], four taps in a word.
    """
    out_channels, inputs, height, width = values.shape
    depthwise = is_depthwise(inputs * groups, out_channels, groups)
    sums = pad_channels(values.sum((1, 2, 3), dtype=torch.int32), groups, depthwise)
    if depthwise:
        rows = values.reshape(1, out_channels, height * width)
    else:
        rows = F.pad(values.permute(0, 2, 3, 1), (0, -inputs % INT8_GROUP)).reshape(groups, out_channels // groups, -1)
    rows = F.pad(rows, (0, -rows.shape[2] % INT8_GROUP, 0, -rows.shape[1] % INT8_BLOCK))
    packed = rows.reshape(rows.shape[0], -1, INT8_BLOCK, rows.shape[2] // INT8_GROUP, INT8_GROUP)
    return packed.transpose(2, 3).contiguous(), sums


def unpack_int8_convolution(
    packed: torch.Tensor, out_channels: int, in_channels: int, kernel: list[int], groups: int
) -> torch.Tensor:
    """The inverse of ``pack_int8_convolution``: int8 [O, C/groups, kh, kw]. ``in_channels`` is C."""
    inputs, (height, width) = in_channels // groups, kernel
    rows = packed.transpose(2, 3).reshape(packed.shape[0], packed.shape[1] * INT8_BLOCK, -1)
    if is_depthwise(in_channels, out_channels, groups):
        return rows[0, :out_channels, : height * width].reshape(out_channels, 1, height, width).contiguous()
    rows = rows[:, : out_channels // groups].reshape(out_channels, height, width, -1)
    return rows[..., :inputs].permute(0, 3, 1, 2).contiguous()


def _output_shape(given: dict[str, Any]) -> tuple[int, ...]:
    """Checks the arguments; the shape of the result."""
    x, weight, residual, groups = given["x"], given["weight"], given["residual"], given["groups"]
    out_channels, kernel = given["out_channels"], given["kernel"]
    if given["activation"] not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"int8_convolution: activation: expected one of {known}, got {given['activation']!r}")
    if given["input_range"] not in INPUT_RANGES:
        known = ", ".join(INPUT_RANGES)
        raise ValueError(f"int8_convolution: input_range: expected one of {known}, got {given['input_range']!r}")
    if x.dim() != 4 or x.dtype not in (torch.float32, torch.uint8):
        raise ValueError(f"int8_convolution: x: expected float32 or uint8 [n, c, h, w], got {kind_of(x)}")
    if x.dtype == torch.uint8 and given["input_range"] != "static":
        raise ValueError(f"int8_convolution: input_range: expected 'static' for uint8, got {given['input_range']!r}")
    if groups < 1 or x.shape[1] % groups or out_channels % groups:
        raise ValueError(
            f"int8_convolution: groups: {x.shape[1]} → {out_channels} channels do not divide into {groups} groups"
        )
    channels, taps = x.shape[1] // groups, kernel[0] * kernel[1]
    if channels * taps > INT8_MAX_K:
        raise ValueError(f"int8_convolution: x: expected at most {INT8_MAX_K} weights an output, got {channels * taps}")
    depthwise = is_depthwise(x.shape[1], out_channels, groups)
    rows = padded_outputs(groups) if depthwise else groups * padded_outputs(out_channels // groups)
    words = -(-taps // INT8_GROUP) if depthwise else taps * -(-channels // INT8_GROUP)
    sets = 1 if depthwise else groups
    _expect("weight", weight, (sets, rows // INT8_BLOCK // sets, words, INT8_BLOCK, INT8_GROUP), (torch.int8,))
    _expect("scale", given["scale"], (rows,), (torch.float32,))
    _expect("column_sums", given["column_sums"], (rows,), (torch.int32,))
    if given["bias"] is not None:
        _expect("bias", given["bias"], (out_channels,), (torch.float32,))
    lists = zip(x.shape[2:], kernel, given["stride"], given["padding"], given["dilation"], strict=True)
    sizes = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in lists]
    shape = (x.shape[0], out_channels, *sizes)
    if residual is not None:
        _expect("residual", residual, shape, (torch.float32, torch.uint8))
    _check_scale("input", given, given["input_range"] in ("static", "tensor"))
    _check_scale("residual", given, residual is not None and residual.dtype == torch.uint8)
    _check_scale("output", given, given["output_scale"] != 0)
    return shape


def _check_scale(name: str, given: dict[str, Any], needed: bool) -> None:
    scale, zero = given[f"{name}_scale"], given[f"{name}_zero"]
    if needed and not 0 < scale < float("inf"):
        raise ValueError(f"int8_convolution: {name}_scale: expected a finite number above 0, got {scale}")
    if needed and not 0 <= zero <= 255:
        raise ValueError(f"int8_convolution: {name}_zero: expected 0 to 255, got {zero}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    same = tensor.dim() == len(shape) and all(a == b for a, b in zip(tensor.shape, shape, strict=True))
    if not same or tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"int8_convolution: {name}: expected {wanted} {list(shape)}, got {kind_of(tensor)}")


@torch.library.custom_op("untorch::int8_convolution", mutates_args=())
def int8_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_channels: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    residual_first: bool,
    input_range: str,
    input_scale: float,
    input_zero: int,
    residual_scale: float,
    residual_zero: int,
    output_scale: float,
    output_zero: int,
    channels_last: bool,
) -> torch.Tensor:
    """The convolution of x [n, c, h, w] with the packed weight; gives [n, out_channels, h', w'].

    x: float32 or uint8. residual: float32, or uint8 with residual_scale and residual_zero.
    weight, column_sums: as ``pack_int8_convolution`` gives them. scale: float32, padded likewise (``pad_channels``).
    bias: float32 [out_channels], or None. activation: a name of ``untorch.ops.activations``.
    residual_first: activation(conv + bias + residual) instead of activation(conv + bias) + residual.
    input_range, input_scale, input_zero: how a float32 x is quantised, or how a uint8 x was.
    output_scale: 0 for a float32 result; else the result is uint8, with output_zero.
    channels_last: the result's memory format; row-major otherwise.

    Raises ValueError.
    """
    given = dict(locals())
    shape = _output_shape(given)
    dtype = torch.uint8 if output_scale else torch.float32
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    taps = kernel[0] * kernel[1]
    served = native.serves("int8_convolution", x if x.dtype == torch.float32 else x.new_empty(1, dtype=torch.float32))
    if x.device.type == "cpu" and served and x.numel() and (taps <= MAX_DEPTHWISE_TAPS or x.shape[1] != groups):
        out = torch.empty(shape, dtype=dtype, memory_format=memory_format)
        native.call(
            "int8_convolution", out, x, weight, scale, column_sums, (bias,), (residual,), out_channels,
            torch.tensor([*kernel, *stride, *padding, *dilation], dtype=torch.int32), groups,
            native.Text(activation.encode()), int(residual_first), native.Text(input_range.encode()),
            float(input_scale), input_zero, float(residual_scale), residual_zero, float(output_scale), output_zero,
        )  # fmt: skip
        return out
    y = int8_convolution_reference(*list(given.values())[:-1])
    return torch.empty_like(y, memory_format=memory_format).copy_(y)


def int8_convolution_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_channels: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    residual_first: bool,
    input_range: str,
    input_scale: float,
    input_zero: int,
    residual_scale: float,
    residual_zero: int,
    output_scale: float,
    output_zero: int,
) -> torch.Tensor:
    """The operator in torch's own operators; sums in float64, which holds them exactly. Its bytes are the kernel's."""
    values, steps = _quantized(x, input_range, input_scale, input_zero)
    plain = unpack_int8_convolution(weight, out_channels, x.shape[1], kernel, groups)
    sums = F.conv2d(values, plain.double(), None, stride, padding, dilation, groups).float()
    depthwise = is_depthwise(x.shape[1], out_channels, groups)
    scales = scale.reshape(1 if depthwise else groups, -1)
    scales = scales[:, : out_channels if depthwise else out_channels // groups].reshape(1, -1, 1, 1)
    folds = activation in _CLAMPS and (residual is None or residual_first or activation == "none")
    unit = torch.tensor(output_scale if folds and output_scale else 1.0, dtype=torch.float32)
    y = sums * (steps * scales / unit)
    if bias is not None:
        y = y + (bias / unit).reshape(-1, 1, 1)
    added = None
    if residual is not None:
        factor = torch.tensor(residual_scale if residual.dtype == torch.uint8 else 1.0, dtype=torch.float32) / unit
        added = (residual.int() - residual_zero if residual.dtype == torch.uint8 else residual).float() * factor
    if folds and output_scale:
        y = y if added is None else y + added
        low, high = _CLAMPS[activation]
        high = min(high / float(unit), 512.0) if activation == "relu6" else high
        return _to_bytes(y.clamp(low, high), low, output_zero)
    if added is not None and residual_first:
        y, added = y + added, None
    y = activate(y, activation)
    y = y if added is None else y + added
    if not output_scale:
        return y
    inverse = 1.0 / torch.tensor(output_scale, dtype=torch.float32)
    return _to_bytes((y * inverse).clamp(-512, 512), -512.0, output_zero)


def _to_bytes(steps: torch.Tensor, least: float, zero: int) -> torch.Tensor:
    return (steps.nan_to_num(nan=least).round() + zero).clamp(0, 255).to(torch.uint8)


def _quantized(x: torch.Tensor, kind: str, scale: float, zero: int) -> tuple[torch.Tensor, torch.Tensor]:
    """u − zero in float64, and the scale [n or 1, 1, 1, 1]."""
    if kind == "static":
        step = torch.full((1, 1, 1, 1), scale, dtype=torch.float32)
        if x.dtype == torch.uint8:
            return x.double() - zero, step
        values, _, _ = quantize_activations(x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).reshape(1, -1),
                                            kind, scale, zero)  # fmt: skip
        return values.reshape(x.shape).double() - zero, step
    values, scales, zeros = quantize_activations(x.reshape(x.shape[0], -1), kind, scale)
    return (values.double() - zeros).reshape(x.shape), scales.reshape(-1, 1, 1, 1)


@int8_convolution.register_fake
def _int8_convolution_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    column_sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_channels: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    residual_first: bool,
    input_range: str,
    input_scale: float,
    input_zero: int,
    residual_scale: float,
    residual_zero: int,
    output_scale: float,
    output_zero: int,
    channels_last: bool,
) -> torch.Tensor:
    shape = _output_shape(dict(locals()))
    dtype = torch.uint8 if output_scale else torch.float32
    if not channels_last:
        return x.new_empty(shape, dtype=dtype)
    _, c, h, w = shape
    return x.new_empty_strided(shape, (h * w * c, 1, w * c, c), dtype=dtype)


OPERATOR = torch.ops.untorch.int8_convolution.default

_RESIDUAL_ARGUMENT, _CHANNELS_LAST_ARGUMENT = 5, 21


@cache
def register_lowering() -> None:
    """Tells Inductor which layouts the operator takes and gives; once, before the first compile."""
    from torch._inductor import ir, lowering

    @lowering.register_lowering(OPERATOR, type_promotion_kind=None)
    def lower(x: Any, *rest: Any) -> Any:
        # The kernel reads row-major images with few channels: it copies them into whole words anyway.
        few = x.get_dtype() == torch.float32 and x.get_size()[1] in range(INT8_GROUP + 1)
        arguments = [x if few else ir.ExternKernel.require_channels_last(x), *rest]
        if (residual := arguments[_RESIDUAL_ARGUMENT]) is not None:
            arguments[_RESIDUAL_ARGUMENT] = ir.ExternKernel.require_channels_last(residual)
        arguments[_CHANNELS_LAST_ARGUMENT] = True
        return ir.TensorBox.create(ir.FallbackKernel.create(OPERATOR, *arguments))
