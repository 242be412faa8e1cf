"""``untorch::nvfp4_int8_linear``: a linear layer of NVFP4 weights in integers, with int8 activations, for CPUs.

y = x · Wᵀ + bias, where W [n, k] is w = e2m1 · block_scale · global_scale, as in ``untorch::nvfp4_linear``. Each part
of 32 inputs of a row of x is quantised to int8 as in ``untorch::w4a8_linear``, x ≈ v · s, and 2 · e2m1 is an integer
from −12 to 12:

    y = Σ over blocks of 16 (Σ v·(2·e2m1) · block_scale · s) · global_scale / 2    the sums of a block in int32, exact

A row with a value that is not finite gives NaN. Block scales that are NaN are not served: they count as ±480.

libuntorch.so computes it, for torch's tensors as in files (``native``). The reference here gives the same integers.
Where the CPU has AMX it multiplies 32 rows and more in bfloat16: x is rounded to it, e2m1 · block_scale is exact, and
sums are float32.
"""

from __future__ import annotations

import torch

from untorch.ops import native
from untorch.ops.nvfp4_layout import BLOCK_SIZE, e2m1_values
from untorch.ops.w4a8 import W4A8_PART, check_operands, quantize_parts
from untorch.ops.w4a8_layout import W4A8_BLOCK, unpack_nvfp4_w4a8

__all__ = ["C_SHIM", "OPERATOR", "nvfp4_int8_linear", "nvfp4_int8_linear_reference"]

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_nvfp4_int8_linear(AtenTensorHandle x, AtenTensorHandle weight, "
    "AtenTensorHandle block_scale, AtenTensorHandle global_scale, int64_t out_features, AtenTensorHandle* bias, "
    "AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::nvfp4_int8_linear", mutates_args=())
def nvfp4_int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gives [..., out_features] in x's dtype, contiguous, for x [..., k].

    x: float32, bfloat16 or float16 (float64 in the reference), the last dimension contiguous.
    weight, block_scale: as ``pack_nvfp4_w4a8`` gives them, for k rounded up to a multiple of 32.
    global_scale: float32 [out_features].
    bias: [out_features] in x's dtype, or None.

    Raises ValueError.
    """
    _check(x, weight, block_scale, global_scale, out_features, bias)
    if x.device.type == "cpu" and native.serves("nvfp4_int8_linear", x):
        out = x.new_empty((*x.shape[:-1], out_features))
        native.call("nvfp4_int8_linear", out, x, weight, block_scale, global_scale, out_features, (bias,))
        return out
    return nvfp4_int8_linear_reference(x, weight, block_scale, global_scale, out_features, bias)


def nvfp4_int8_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator in torch's own operators, on any device, with the whole weight in float64."""
    codes, scales = unpack_nvfp4_w4a8(weight, block_scale, out_features)
    matrix = e2m1_values(codes, torch.float64) * scales.double().repeat_interleave(BLOCK_SIZE, 1)
    steps, part_scale = quantize_parts(x, codes.shape[1])
    y: torch.Tensor = (steps.double() * part_scale.double()).flatten(-2) @ (matrix * global_scale.double()[:, None]).T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype).contiguous()


@nvfp4_int8_linear.register_fake
def _nvfp4_int8_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(x, weight, block_scale, global_scale, out_features, bias)
    return x.new_empty((*x.shape[:-1], out_features))


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None,
) -> None:
    panels, k = -(-out_features // W4A8_BLOCK), -(-x.shape[-1] // W4A8_PART) * W4A8_PART if x.dim() else 0
    expected = {
        "weight": (weight, (panels, k // 8, W4A8_BLOCK), (torch.int32,)),
        "block_scale": (block_scale, (panels, k // BLOCK_SIZE, W4A8_BLOCK), (torch.float8_e4m3fn,)),
        "global_scale": (global_scale, (out_features,), (torch.float32,)),
        "bias": (bias, (out_features,), (x.dtype,)),
    }
    check_operands("nvfp4_int8_linear", x, expected)


OPERATOR = torch.ops.untorch.nvfp4_int8_linear.default
