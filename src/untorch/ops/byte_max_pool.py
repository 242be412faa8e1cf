"""``untorch::byte_max_pool``: maximum pooling of uint8 images, channels last, between int8 convolutions.

The bytes of the maximum are the maximum of the bytes, as scales are above 0. The implementation here is the reference;
libuntorch.so has the fast one. Layouts are handled as in ``packed_convolution``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops.describe import kind_of

__all__ = ["C_SHIM", "OPERATOR", "byte_max_pool", "register_lowering"]

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_byte_max_pool(AtenTensorHandle x, const int64_t* output, int64_t output_len_, "
    "const int64_t* kernel, int64_t kernel_len_, const int64_t* stride, int64_t stride_len_, const int64_t* padding, "
    "int64_t padding_len_, const int64_t* dilation, int64_t dilation_len_, int32_t channels_last, "
    'AtenTensorHandle* ret0) __asm__("aoti_torch_cpu_untorch_byte_max_pool")'
)


@torch.library.custom_op("untorch::byte_max_pool", mutates_args=())
def byte_max_pool(
    x: torch.Tensor,
    output: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    channels_last: bool,
) -> torch.Tensor:
    """Gives uint8 [n, c, *output] for x uint8 [n, c, h, w]. Padding is never the maximum, but of a window of padding
    alone, which gives 0.

    output: height and width of the result, which with ``ceil_mode`` are more than whole windows.
    channels_last: the result's memory format; row-major otherwise.

    Raises ValueError.
    """
    if x.dim() != 4 or x.dtype != torch.uint8:
        raise ValueError(f"byte_max_pool: x: expected uint8 [n, c, h, w], got {kind_of(x)}")
    # Bytes and the padding below them are exact in float32.
    reach = [(size - 1) * s + d * (k - 1) + 1 for size, s, d, k in zip(output, stride, dilation, kernel, strict=True)]
    behind = [max(r - p - size, 0) for r, p, size in zip(reach, padding, x.shape[2:], strict=True)]
    padded = F.pad(x.float(), (padding[1], behind[1], padding[0], behind[0]), value=0.0)
    y = F.max_pool2d(padded, kernel, stride, 0, dilation)[:, :, : output[0], : output[1]].to(torch.uint8)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty_like(y, memory_format=memory_format).copy_(y)


@byte_max_pool.register_fake
def _byte_max_pool_fake(
    x: torch.Tensor,
    output: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    channels_last: bool,
) -> torch.Tensor:
    n, c = x.shape[:2]
    h, w = output
    if not channels_last:
        return x.new_empty((n, c, h, w))
    return x.new_empty_strided((n, c, h, w), (h * w * c, 1, w * c, c))


OPERATOR = torch.ops.untorch.byte_max_pool.default

_CHANNELS_LAST_ARGUMENT = 5


@cache
def register_lowering() -> None:
    """Tells Inductor which layouts the operator takes and gives; once, before the first compile."""
    from torch._inductor import ir, lowering

    @lowering.register_lowering(OPERATOR, type_promotion_kind=None)
    def lower(x: Any, *rest: Any) -> Any:
        arguments = list(rest)
        arguments[_CHANNELS_LAST_ARGUMENT] = True
        return ir.TensorBox.create(
            ir.FallbackKernel.create(OPERATOR, ir.ExternKernel.require_channels_last(x), *arguments)
        )
