"""``untorch::fused_convolution``: a 2-D or 3-D convolution on CUDA with what follows it in one kernel, channels last.

y = activation(conv(x, W) + bias + residual). The weight [O, C/groups, kernel…] (transposed: [C, O/groups, kernel…]) is
stored with the second dimension innermost, [O, kernel…, C/groups], and of a depthwise convolution (O = C = groups) as
[kernel…, C]. Behind a dense convolution only ReLU costs no kernel of its own. The implementation here is the reference;
libuntorch.so has the fast one.

In a traced graph results have the memory format that PyTorch gives them, so that tracing gives every later node the
strides that it had before. Inductor's lowering asks for channels-last operands and gives a channels-last result:
layouts change at the ends of a chain of convolutions only.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from untorch.ops import native
from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.describe import kind_of

__all__ = [
    "C_SHIM", "DTYPES", "OPERATOR", "Tuning", "fused_convolution", "is_depthwise", "register_lowering", "stored_weight",
    "tune",
]  # fmt: skip

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_OF_A_PLAN = 256  # bytes
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

C_SHIM = (
    "AOTITorchError aoti_torch_cuda_fused_convolution(AtenTensorHandle x, AtenTensorHandle weight, "
    "AtenTensorHandle* bias, AtenTensorHandle* residual, const int64_t* stride, int64_t stride_len_, "
    "const int64_t* padding, int64_t padding_len_, const int64_t* dilation, int64_t dilation_len_, "
    "int32_t transposed, const int64_t* output_padding, int64_t output_padding_len_, int64_t groups, "
    "const char* activation, int32_t channels_last, const char* plan, AtenTensorHandle* ret0)"
)


def is_depthwise(weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """Whether a weight as PyTorch has it is stored as a depthwise one."""
    return not transposed and groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1


def stored_weight(weight: torch.Tensor, transposed: bool, groups: int) -> torch.Tensor:
    """A weight as the operator takes it: a new contiguous tensor."""
    if is_depthwise(weight, transposed, groups):
        return weight.squeeze(1).movedim(0, -1).contiguous()
    return weight.movedim(1, -1).contiguous()


def _plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, groups: int, activation: str
) -> torch.Tensor:
    """Checks the arguments; the weight as PyTorch has it."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"fused_convolution: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if x.dtype not in DTYPES or x.dim() not in _MEMORY_FORMATS:
        raise ValueError(
            f"fused_convolution: x: expected float32, bfloat16 or float16 of 4 or 5 dimensions, got {kind_of(x)}"
        )
    depthwise = not transposed and weight.dim() == x.dim() - 1
    channels = x.shape[1]
    inputs = channels if transposed or depthwise else channels // groups
    layout = f"[{inputs}, kernel…, outputs]" if transposed else f"[outputs, kernel…, {inputs}]"
    fits = weight.shape[0 if transposed else -1] == inputs and (weight.dim() == x.dim() or depthwise)
    if weight.dtype != x.dtype or not fits or (depthwise and groups != channels):
        dtype = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"fused_convolution: weight: expected {dtype} {layout}, got {kind_of(weight)}")
    plain = weight.movedim(-1, 0).unsqueeze(1) if depthwise else weight.movedim(-1, 1)
    outputs = plain.shape[1] * groups if transposed else plain.shape[0]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != outputs or bias.dtype != x.dtype):
        dtype = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"fused_convolution: bias: expected {dtype} [{outputs}], got {kind_of(bias)}")
    return plain


def _check_residual(residual: torch.Tensor | None, like: torch.Tensor) -> None:
    if residual is None:
        return
    same = residual.dtype == like.dtype and residual.dim() == like.dim()
    if not same or any(a != b for a, b in zip(residual.shape, like.shape, strict=True)):
        expected = f"{str(like.dtype).removeprefix('torch.')} {list(like.shape)}"
        raise ValueError(f"fused_convolution: residual: expected {expected}, got {kind_of(residual)}")


@torch.library.custom_op("untorch::fused_convolution", mutates_args=())
def fused_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    activation: str,
    channels_last: bool,
    plan: str = "",
) -> torch.Tensor:
    """The convolution of x [n, c, h, w] or [n, c, d, h, w], as ``aten.convolution`` has its arguments.

    weight: what ``stored_weight`` gives. residual: of the result's shape.
    channels_last: the result's memory format; row-major otherwise.
    plan: what ``tune`` gave; any other text is as good as none. Raises ValueError.
    """
    plain = _plain(x, weight, bias, transposed, groups, activation)
    y = torch.ops.aten.convolution(x, plain, bias, stride, padding, dilation, transposed, output_padding, groups)
    _check_residual(residual, y)
    if residual is not None:
        y = y + residual
    y = activate(y, activation)
    memory_format = _MEMORY_FORMATS[x.dim()] if channels_last else torch.contiguous_format
    return torch.empty_like(y, memory_format=memory_format).copy_(y)


@fused_convolution.register_fake
def _fused_convolution_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    activation: str,
    channels_last: bool,
    plan: str = "",
) -> torch.Tensor:
    plain = _plain(x, weight, bias, transposed, groups, activation)
    y = torch.ops.aten.convolution(x, plain, bias, stride, padding, dilation, transposed, output_padding, groups)
    _check_residual(residual, y)
    memory_format = _MEMORY_FORMATS[x.dim()] if channels_last else torch.contiguous_format
    return torch.empty_like(y, memory_format=memory_format)


OPERATOR = torch.ops.untorch.fused_convolution.default

_CHANNELS_LAST_ARGUMENT = 11


@dataclass(frozen=True)
class Tuning:
    """The plan of cuDNN's fastest algorithm, empty where there is no choice; microseconds of its own choice and it."""

    plan: str
    first_us: float
    best_us: float


def tune(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    activation: str,
    tf32: bool,
) -> Tuning:
    """Times cuDNN's algorithms on the GPU of the operands. The plan is for such a GPU, this cuDNN and these sizes."""
    lists = (stride, padding, dilation, transposed, output_padding, groups)
    like = OPERATOR(x.to("meta"), weight.to("meta"), None, None, *lists, "none", True)
    out = torch.empty_like(like, device=x.device)

    def counted(values: list[int]) -> tuple[Any, int]:
        return native.Raw((ctypes.c_int64 * len(values))(*values)), len(values)

    text = ctypes.create_string_buffer(_MOST_OF_A_PLAN)
    first, best = ctypes.c_double(), ctypes.c_double()
    # Launches are captured, which the default stream refuses.
    stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        native.call(
            "tune_fused_convolution", out, x, weight, (bias,), (residual,), *counted(stride), *counted(padding),
            *counted(dilation), int(transposed), *counted(output_padding), groups, native.Text(activation.encode()),
            int(tf32), native.Raw(text), _MOST_OF_A_PLAN, native.Raw(ctypes.byref(first)),
            native.Raw(ctypes.byref(best)),
        )  # fmt: skip
    stream.synchronize()
    return Tuning(text.value.decode(), first.value, best.value)


@cache
def register_lowering() -> None:
    """Tells Inductor which layouts the operator takes and gives; once, before the first compile."""
    from torch._inductor import ir, lowering

    @lowering.register_lowering(OPERATOR, type_promotion_kind=None)
    def lower(x: Any, weight: Any, bias: Any, residual: Any, *rest: Any) -> Any:
        volume = len(x.get_size()) == 5
        dense = ir.ExternKernel.require_channels_last_3d if volume else ir.ExternKernel.require_channels_last
        x = dense(x)
        if residual is not None:
            residual = dense(residual)
        arguments = [x, weight, bias, residual, *rest]
        arguments[_CHANNELS_LAST_ARGUMENT] = True
        return ir.TensorBox.create(ir.FallbackKernel.create(OPERATOR, *arguments))
