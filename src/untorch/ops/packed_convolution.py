"""``untorch::packed_convolution``: a 2-D convolution whose weight was packed for the NHWC kernels at export.

y = activation(conv(x, W) + bias) + residual, or activation(conv(x, W) + bias + residual). The weight
[O, C/groups, kh, kw] is stored as [groups, ceil(o / 16), kh · kw · c, 16], with o = O/groups outputs and c = C/groups
inputs of a group and zeros behind o; of 3 x 3 kernels with c = o = 4 or 8 as [1, O / 16, kh · kw · c, 16], several
groups side by side; of a depthwise convolution (c = o = 1) as [ceil(C / 16), kh · kw, 16]; for
Winograd's F(2 x 2, 3 x 3) transformed, as [16, O / 16, C, 16]. A bfloat16 weight is stored in pairs of channels,
[groups, ceil(o / 16), kh · kw · c / 2, 16, 2]: where the CPU has AVX512_BF16 the input is rounded to bfloat16 and
multiplied in pairs, elsewhere the weight is widened; sums, bias, residual and result are float32. The implementation
here is the reference; libuntorch.so has the fast one.

In a traced graph results are row-major, so that tracing gives every later node the strides that it had before.
Inductor's lowering asks for channels-last operands and gives a channels-last result: layouts change at the ends of a
chain of convolutions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops.activations import ACTIVATIONS, activate

__all__ = [
    "BLOCK",
    "C_SHIM",
    "OPERATOR",
    "is_depthwise",
    "pack_bfloat16_weight",
    "pack_small_groups_weight",
    "pack_weight",
    "pack_winograd_weight",
    "packed_convolution",
    "register_lowering",
    "serves_bfloat16",
    "serves_small_groups",
    "unpack_weight",
    "unpack_winograd_weight",
]

BLOCK = 16
_FEW_CHANNELS = 8  # up to here the kernels pad the image, and a window's row is one run

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_packed_convolution(AtenTensorHandle x, AtenTensorHandle weight, "
    "AtenTensorHandle* bias, AtenTensorHandle* residual, int64_t out_channels, const int64_t* kernel, "
    "int64_t kernel_len_, const int64_t* stride, int64_t stride_len_, const int64_t* padding, int64_t padding_len_, "
    "const int64_t* dilation, int64_t dilation_len_, int64_t groups, const char* activation, int32_t residual_first, "
    "int32_t channels_last, int32_t winograd, AtenTensorHandle* ret0) "
    '__asm__("aoti_torch_cpu_untorch_packed_convolution")'
)


def is_depthwise(channels: int, out_channels: int, groups: int) -> bool:
    """One input and one output channel a group, and more than one group."""
    return groups > 1 and groups == channels == out_channels


def _ceil(value: int) -> int:
    return -(-value // BLOCK)


def serves_small_groups(channels: int, out_channels: int, lists: Sequence[list[int]], groups: int) -> bool:
    """Whether there is a kernel for several groups side by side. ``lists``: kernel, stride, padding, dilation."""
    kernel, stride, _, dilation = lists
    return (
        groups > 1
        and channels == out_channels
        and channels % BLOCK == 0
        and channels // groups in (4, 8)
        and kernel == [3, 3]
        and dilation == [1, 1]
        and stride in ([1, 1], [2, 2])
    )


def pack_small_groups_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs W [O, c, kh, kw] with the groups' outputs side by side, as the module's docstring says."""
    rows = weight.permute(0, 2, 3, 1).flatten(1)
    return rows.reshape(1, -1, BLOCK, rows.shape[1]).transpose(2, 3).contiguous()


def pack_weight(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Packs W [O, C/groups, kh, kw] into a new contiguous tensor of the same dtype, as the module's docstring says."""
    out_channels, inputs, height, width = weight.shape
    if is_depthwise(inputs * groups, out_channels, groups):
        padded = weight.new_zeros((_ceil(out_channels) * BLOCK, height * width))
        padded[:out_channels] = weight.reshape(out_channels, height * width)
        return padded.reshape(-1, BLOCK, height * width).transpose(1, 2).contiguous()
    outputs = out_channels // groups
    rows = weight.permute(0, 2, 3, 1).reshape(groups, outputs, height * width * inputs)
    padded = weight.new_zeros((groups, _ceil(outputs) * BLOCK, rows.shape[2]))
    padded[:, :outputs] = rows
    return padded.reshape(groups, -1, BLOCK, rows.shape[2]).transpose(2, 3).contiguous()


def serves_bfloat16(channels: int, out_channels: int, kernel: list[int], groups: int) -> bool:
    """Whether there are kernels for a bfloat16 weight: pairs of channels, no window over few channels."""
    pads_beforehand = groups == 1 and channels <= _FEW_CHANNELS and kernel[1] > 1
    return channels // groups % 2 == 0 and not pads_beforehand and not is_depthwise(channels, out_channels, groups)


def pack_bfloat16_weight(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Packs W [O, C/groups, kh, kw], rounded to bfloat16, in pairs of channels, as the module's docstring says."""
    packed = pack_weight(weight.to(torch.bfloat16), groups)
    *sizes, rows, block = packed.shape
    return packed.reshape(*sizes, rows // 2, 2, block).transpose(-2, -1).contiguous()


def unpack_weight(packed: torch.Tensor, out_channels: int, kernel: list[int]) -> torch.Tensor:
    """The inverse of the functions that pack a weight, but for Winograd's: [O, C/groups, kh, kw]."""
    height, width = kernel
    if packed.dim() == 5:
        packed = packed.transpose(-2, -1).flatten(2, 3)
    if packed.dim() == 3:
        rows = packed.transpose(1, 2).reshape(-1, 1, height, width)
        return rows[:out_channels].contiguous()
    groups = packed.shape[0]
    outputs, inputs = out_channels // groups, packed.shape[2] // (height * width)
    rows = packed.transpose(2, 3).reshape(groups, -1, packed.shape[2])[:, :outputs]
    return rows.reshape(out_channels, height, width, inputs).permute(0, 3, 1, 2).contiguous()


# G of Winograd's F(2 x 2, 3 x 3), and what takes it back.
_TRANSFORM = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
_INVERSE = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, -1.0, 0.0), (0.0, 0.0, 0.0, 1.0))


def pack_winograd_weight(weight: torch.Tensor) -> torch.Tensor:
    """G · W · Gᵀ of W [O, C, 3, 3], computed in float64, as [16, O / 16, C, 16]."""
    out_channels, channels = weight.shape[:2]
    g = torch.tensor(_TRANSFORM, dtype=torch.float64)
    spectrum = torch.einsum("ai,ocij,bj->aboc", g, weight.double(), g).reshape(16, -1, BLOCK, channels)
    assert spectrum.shape[1] * BLOCK == out_channels
    return spectrum.transpose(2, 3).to(weight.dtype).contiguous()


def unpack_winograd_weight(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_winograd_weight`` but for rounding: [O, C, 3, 3]."""
    channels = packed.shape[2]
    back = torch.tensor(_INVERSE, dtype=packed.dtype)
    spectrum = packed.transpose(2, 3).reshape(4, 4, -1, channels)
    return torch.einsum("ia,jb,aboc->ocij", back, back, spectrum).contiguous()


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _output_shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_channels: int,
    lists: tuple[list[int], list[int], list[int], list[int]],
    groups: int,
    activation: str,
    winograd: bool,
) -> tuple[int, ...]:
    """Checks the arguments; the shape of the result."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"packed_convolution: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    if x.dim() != 4:
        raise ValueError(f"packed_convolution: x: expected 4 dimensions, got shape {tuple(x.shape)}")
    kernel, stride, padding, dilation = lists
    channels, taps = x.shape[1], kernel[0] * kernel[1]
    if weight.dtype == torch.bfloat16 and (winograd or not serves_bfloat16(channels, out_channels, kernel, groups)):
        raise ValueError(
            "packed_convolution: weight: expected float32, got bfloat16: it needs an even number of channels a group, "
            f"more than {_FEW_CHANNELS} unless the kernel is 1 wide, no Winograd, and not one channel a group"
        )
    if winograd:
        if lists != ([3, 3], [1, 1], padding, [1, 1]) or groups != 1 or channels % BLOCK or out_channels % BLOCK:
            raise ValueError(
                "packed_convolution: winograd: expected a 3 x 3 kernel, stride and dilation 1, no groups and multiples "
                f"of {BLOCK} channels"
            )
        _expect("weight", "the packed shape", weight, (16, out_channels // BLOCK, channels, BLOCK))
    elif is_depthwise(channels, out_channels, groups):
        _expect("weight", "the packed shape", weight, (_ceil(channels), taps, BLOCK))
    else:
        rows = taps * (channels // groups)
        packed: tuple[int, ...] = (groups, _ceil(out_channels // groups), rows, BLOCK)
        if weight.shape[0] == 1 and serves_small_groups(channels, out_channels, lists, groups):
            packed = (1, out_channels // BLOCK, rows, BLOCK)
        if weight.dtype == torch.bfloat16:
            packed = (*packed[:2], rows // 2, BLOCK, 2)
        _expect("weight", "the packed shape", weight, packed)
    if bias is not None:
        _expect("bias", "the shape", bias, (out_channels,))
    sizes = [_output_size(x.shape[2 + d], kernel[d], stride[d], padding[d], dilation[d]) for d in (0, 1)]
    shape = (x.shape[0], out_channels, *sizes)
    if residual is not None:
        _expect("residual", "the shape", residual, shape)
    return shape


def _expect(name: str, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"packed_convolution: {name}: expected {what} {shape}, got {tuple(tensor.shape)}")


@torch.library.custom_op("untorch::packed_convolution", mutates_args=())
def packed_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
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
    channels_last: bool,
    winograd: bool,
) -> torch.Tensor:
    """The convolution of x [n, c, h, w] with the packed weight; gives [n, out_channels, h', w'].

    residual_first: activation(conv + bias + residual) instead of activation(conv + bias) + residual.
    channels_last: the result's memory format; row-major otherwise.
    winograd: the weight is that of ``pack_winograd_weight``.

    A bfloat16 weight is that of ``pack_bfloat16_weight``; x, bias, residual and result are float32 all the same.
    """
    lists = (kernel, stride, padding, dilation)
    _output_shape(x, weight, bias, residual, out_channels, lists, groups, activation, winograd)
    plain = unpack_winograd_weight(weight) if winograd else unpack_weight(weight, out_channels, kernel)
    if plain.dtype == torch.bfloat16:
        x, plain = x.to(torch.bfloat16).to(x.dtype), plain.to(x.dtype)
    y = F.conv2d(x, plain, bias, stride, padding, dilation, groups)
    if residual is not None and residual_first:
        y = y + residual
    y = activate(y, activation)
    if residual is not None and not residual_first:
        y = y + residual
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty_like(y, memory_format=memory_format).copy_(y)


@packed_convolution.register_fake
def _packed_convolution_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
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
    channels_last: bool,
    winograd: bool,
) -> torch.Tensor:
    lists = (kernel, stride, padding, dilation)
    shape = _output_shape(x, weight, bias, residual, out_channels, lists, groups, activation, winograd)
    if not channels_last:
        return x.new_empty(shape)
    _, c, h, w = shape
    return x.new_empty_strided(shape, (h * w * c, 1, w * c, c))


OPERATOR = torch.ops.untorch.packed_convolution.default

_CHANNELS_LAST_ARGUMENT = 12


@cache
def register_lowering() -> None:
    """Tells Inductor which layouts the operator takes and gives; once, before the first compile."""
    from torch._inductor import ir, lowering

    @lowering.register_lowering(OPERATOR, type_promotion_kind=None)
    def lower(x: Any, weight: Any, bias: Any, residual: Any, *rest: Any) -> Any:
        x = ir.ExternKernel.require_channels_last(x)
        if residual is not None:
            residual = ir.ExternKernel.require_channels_last(residual)
        arguments = [x, weight, bias, residual, *rest]
        arguments[_CHANNELS_LAST_ARGUMENT] = True
        return ir.TensorBox.create(ir.FallbackKernel.create(OPERATOR, *arguments))
