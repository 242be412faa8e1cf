"""``untorch::moe_grouped_mm``: the GEMM of a mixture of experts, on tokens that are sorted by expert.

    y[offs[g - 1] : offs[g]] = input[offs[g - 1] : offs[g]] · weight[g]    with offs[-1] = 0

Rows behind the last group are 0. It is transformers' ``grouped_mm_fallback`` with a C function, and
``aten._grouped_mm`` of a 2-D and a 3-D operand for more dtypes: in a traced program PyTorch's own is for bfloat16 and
for strides that are multiples of 16 bytes. The implementation here is the reference.
"""

from __future__ import annotations

import torch

from untorch.ops.describe import kind_of

__all__ = ["C_SHIMS", "DTYPES", "OPERATOR", "moe_grouped_mm"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# AOTInductor declares all of them, and calls the one of the model's device.
C_SHIMS = [
    f"AOTITorchError aoti_torch_{device}_moe_grouped_mm(AtenTensorHandle input, AtenTensorHandle weight, "
    f"AtenTensorHandle offs, AtenTensorHandle* ret0)"
    for device in ("cpu", "cuda")
]


@torch.library.custom_op("untorch::moe_grouped_mm", mutates_args=())
def moe_grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Gives [M, N] in input's dtype, contiguous.

    input: bfloat16, float16 or float32 [M, K], rows sorted by expert.
    weight: [experts, K, N] of input's dtype. Any strides; a transposed [experts, N, K] is as fast.
    offs: int32 [experts]: where each expert's rows end. They must not decrease, and stay within M.

    Sums are in float32. Raises ValueError. The reference and the CPU's C function read offs and refuse wrong ones; on a
    GPU they are cut to what is allowed.
    """
    _check(input, weight, offs)
    y = input.new_zeros((input.shape[0], weight.shape[2]))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if not start <= end <= input.shape[0]:
            raise ValueError(
                f"moe_grouped_mm: offs: must not decrease and stay within {input.shape[0]}, got {end} at {expert}"
            )
        y[start:end] = input[start:end] @ weight[expert]
        start = end
    return y


@moe_grouped_mm.register_fake
def _moe_grouped_mm_fake(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    _check(input, weight, offs)
    return input.new_empty((input.shape[0], weight.shape[2]))


def _check(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> None:
    if input.dtype not in DTYPES or input.dim() != 2:
        raise ValueError(
            f"moe_grouped_mm: input: expected bfloat16, float16 or float32 [tokens, K], got {kind_of(input)}"
        )
    if weight.dtype != input.dtype or weight.dim() != 3 or weight.shape[1] != input.shape[1]:
        raise ValueError(
            f"moe_grouped_mm: weight: expected {str(input.dtype).removeprefix('torch.')} [experts, "
            f"{input.shape[1]}, N] as input has, got {kind_of(weight)}"
        )
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.shape[0] != weight.shape[0]:
        raise ValueError(f"moe_grouped_mm: offs: expected int32 [{weight.shape[0]}], got {kind_of(offs)}")
    for name, tensor in (("weight", weight), ("offs", offs)):
        if tensor.device != input.device:
            raise ValueError(
                f"moe_grouped_mm: {name}: expected the device of input, {input.device}, got {tensor.device}"
            )


OPERATOR = torch.ops.untorch.moe_grouped_mm.default
