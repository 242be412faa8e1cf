"""``untorch::int4_moe``: a mixture of experts, each a gated MLP, whose weights are stored in four bits.

    y[m] = Σ_j topk_weights[m, j] · (W2[e] · act + b2[e])    with e = topk_ids[m, j]
    (gate, up) = W13[e] · x[m] + b13[e]
    act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g)    with g = min(gate, limit)

Without biases, alpha 1, beta 0 and no limit are SiLU: act = silu(gate) · up. In W13 the rows of the gate come first,
then those of up. The matrices of all experts lie below each other, [E · 2·I, K] and [E · K, I], and are packed like one
weight: as ``untorch::int4_linear`` has it (4-D), and activations are in floating point; or, on CPUs, as
``untorch::w4a8_linear`` has it (3-D), and the inputs of both GEMMs are quantised to int8 in parts of 32.

libuntorch.so computes it, for torch's tensors as in files (``native``). The reference here, which makes the weights of
one expert after the other in float32, is for the dtypes, devices and layouts that the library does not serve.
"""

from __future__ import annotations

import torch

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.int4 import GROUP_SIZES, dequantize_int4
from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, LANES, N_TILE
from untorch.ops.moe import check_ids, check_numbers, check_tokens, expect, run_experts
from untorch.ops.w4a8 import quantize_parts
from untorch.ops.w4a8_layout import W4A8_BLOCK, unpack_w4a8

__all__ = ["C_SHIMS", "OPERATOR", "check_weights", "int4_moe", "int4_moe_reference"]

_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# AOTInductor declares all of them, and calls the one of the model's device.
C_SHIMS = [
    f"AOTITorchError aoti_torch_{device}_int4_moe(AtenTensorHandle hidden_states, AtenTensorHandle topk_weights, "
    f"AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale_and_zero, AtenTensorHandle w2, "
    f"AtenTensorHandle w2_scale_and_zero, int64_t group_size, int64_t intermediate, AtenTensorHandle* w13_bias, "
    f"AtenTensorHandle* w2_bias, double swiglu_alpha, double swiglu_beta, double* swiglu_limit, AtenTensorHandle* ret0)"
    for device in ("cpu", "cuda")
]


@torch.library.custom_op("untorch::int4_moe", mutates_args=())
def int4_moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale_and_zero: torch.Tensor,
    w2: torch.Tensor,
    w2_scale_and_zero: torch.Tensor,
    group_size: int,
    intermediate: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """The sum of each token's experts, by their weights; gives [M, K] in hidden_states' dtype, contiguous.

    hidden_states: bfloat16, float16, float32 or float64 [M, K], the last dimension contiguous; K a multiple of 16.
    topk_weights: float32 [M, top_k], contiguous.
    topk_ids: int32 [M, top_k], contiguous: experts from 0 to E - 1, or -1 for one that is elsewhere, which adds
        nothing.
    w13, w13_scale_and_zero: [E · 2·I, K], packed, with K and I padded to the layout's units.
    w2, w2_scale_and_zero: [E · K, I], in the same layout.
    group_size: 32, 64, 128 or 256.
    intermediate: I, a multiple of 8.
    w13_bias, w2_bias: float32 [E, 2·I], the gate's before those of up, and [E, K], contiguous; None: none.
    swiglu_alpha, swiglu_beta: finite numbers of float32.
    swiglu_limit: above 0; None: none.

    Sums are in float32, for float64 in that; so is the activation between the two GEMMs, but on a GPU, where act is
    rounded to hidden_states' dtype, and so are the weights. GPUs have kernels for inner_k_tiles 8. Raises ValueError;
    RuntimeError for what the GPU cannot do. On the CPU ids of no expert are refused; on a GPU they count as -1, and the
    next operator of the library reports them.
    """
    _check(
        hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate,
        w13_bias, w2_bias,
    )  # fmt: skip
    check_numbers("int4_moe", swiglu_alpha, swiglu_beta, swiglu_limit)
    experts = check_weights("int4_moe", w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate)[0]
    has_kernel = not topk_ids.is_cuda or w13.shape[3:] == w2.shape[3:] == (INNER_K_TILES[-1] // 2,)
    if topk_ids.numel() and has_kernel and native.serves("int4_moe", hidden_states):
        if not topk_ids.is_cuda:
            check_ids("int4_moe", topk_ids.flatten().tolist(), experts)
        out = hidden_states.new_empty(hidden_states.shape)
        native.call(
            "int4_moe", out, hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero,
            group_size, intermediate, (w13_bias,), (w2_bias,), swiglu_alpha, swiglu_beta, (swiglu_limit,),
        )  # fmt: skip
        return out
    return int4_moe_reference(
        hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate,
        w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit,
    )  # fmt: skip


def int4_moe_reference(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale_and_zero: torch.Tensor,
    w2: torch.Tensor,
    w2_scale_and_zero: torch.Tensor,
    group_size: int,
    intermediate: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """The operator in torch's own operators, on any device: one expert's weights at a time, in float32 or float64.

    It reads the ids on the CPU.
    """
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    k = hidden_states.shape[1]
    experts = check_weights("int4_moe", w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate)[0]

    def linear(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, expert: int, n: int) -> torch.Tensor:
        if packed.dim() == 3:
            blocks = slice(expert * n // W4A8_BLOCK, (expert + 1) * n // W4A8_BLOCK)
            values, own = unpack_w4a8(packed[blocks], scales[blocks], n)
            scale, zero = own.double().permute(2, 1, 0).unsqueeze(-1)
            matrix = ((values.double().reshape(n, -1, group_size) - 8) * scale + zero).reshape(values.shape)
            steps, part_scale = quantize_parts(x, values.shape[1])
            return torch.nn.functional.linear((steps.double() * part_scale.double()).flatten(-2), matrix).to(wide)
        tiles = packed[expert * n // N_TILE : (expert + 1) * n // N_TILE]
        own = scales[:, expert * n : (expert + 1) * n]
        matrix = dequantize_int4(tiles, own, group_size, wide)[:, : x.shape[-1]]
        return torch.nn.functional.linear(x, matrix)

    return run_experts(
        "int4_moe", hidden_states, topk_weights, topk_ids, experts,
        lambda x, expert: linear(x, w13, w13_scale_and_zero, expert, 2 * intermediate).chunk(2, -1),
        lambda x, expert: linear(x, w2, w2_scale_and_zero, expert, k),
        w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit,
    )  # fmt: skip


@int4_moe.register_fake
def _int4_moe_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale_and_zero: torch.Tensor,
    w2: torch.Tensor,
    w2_scale_and_zero: torch.Tensor,
    group_size: int,
    intermediate: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    _check(
        hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate,
        w13_bias, w2_bias,
    )  # fmt: skip
    check_numbers("int4_moe", swiglu_alpha, swiglu_beta, swiglu_limit)
    return hidden_states.new_empty(hidden_states.shape)


def check_weights(
    caller: str,
    w13: torch.Tensor,
    w13_scale_and_zero: torch.Tensor,
    w2: torch.Tensor,
    w2_scale_and_zero: torch.Tensor,
    group_size: int,
    intermediate: int,
) -> tuple[int, int, int]:
    """(E, K, the K that W13 is padded to). Raises ValueError that begins with ``caller`` and names the argument."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"{caller}: group_size: expected 32, 64, 128 or 256, got {group_size}")
    if intermediate < 8 or intermediate % 8:
        raise ValueError(f"{caller}: intermediate: expected a multiple of 8 above 0, got {intermediate}")
    rows, k13 = _sizes(caller, "w13", w13, w13_scale_and_zero, group_size)
    if not rows or rows % (2 * intermediate):
        raise ValueError(
            f"{caller}: w13: expected a multiple of {2 * intermediate} outputs, two times intermediate, got "
            f"{kind_of(w13)}"
        )
    experts = rows // (2 * intermediate)
    if w2.dim() != w13.dim():
        raise ValueError(f"{caller}: w2: expected the layout of w13, got {kind_of(w2)}")
    outputs, k2 = _sizes(caller, "w2", w2, w2_scale_and_zero, group_size)
    if outputs % experts or outputs // experts % 16 or not outputs or k2 < intermediate or outputs // experts > k13:
        raise ValueError(
            f"{caller}: w2: expected K outputs for each of {experts} experts, K a multiple of 16 and at most {k13}, "
            f"and at least {intermediate} inputs, got {kind_of(w2)}"
        )
    for name, tensor in (
        ("w13_scale_and_zero", w13_scale_and_zero), ("w2", w2), ("w2_scale_and_zero", w2_scale_and_zero),
    ):  # fmt: skip
        if tensor.device != w13.device:
            raise ValueError(f"{caller}: {name}: expected the device of w13, {w13.device}, got {tensor.device}")
    return experts, outputs // experts, k13


def _sizes(caller: str, name: str, weight: torch.Tensor, scales: torch.Tensor, group: int) -> tuple[int, int]:
    """(outputs, inputs) with padding."""
    if weight.dtype != torch.int32 or not weight.is_contiguous() or weight.dim() not in (3, 4):
        raise ValueError(f"{caller}: {name}: expected contiguous int32, packed as int4, got {kind_of(weight)}")
    if weight.dim() == 3:
        if weight.shape[2] != W4A8_BLOCK:
            raise ValueError(f"{caller}: {name}: expected [n / 16][k / 8][16], got {kind_of(weight)}")
        n, k = weight.shape[0] * W4A8_BLOCK, weight.shape[1] * 8
        parts = 1 if scales.dim() == 4 and scales.shape[2] == 1 else 2
        shape: tuple[int, ...] = (weight.shape[0], k // group, parts, W4A8_BLOCK)
    else:
        if weight.shape[2] != LANES or 2 * weight.shape[3] not in INNER_K_TILES:
            raise ValueError(f"{caller}: {name}: expected [n / 8][k / (16·t)][32][t / 2], got {kind_of(weight)}")
        n, k = weight.shape[0] * N_TILE, weight.shape[1] * weight.shape[3] * 2 * K_TILE
        shape = (k // group, n, 2)
    if k % group:
        raise ValueError(f"{caller}: {name}: expected k a multiple of the group size {group}, got {k}")
    if tuple(scales.shape) != shape or scales.dtype not in _SCALE_DTYPES or not scales.is_contiguous():
        raise ValueError(
            f"{caller}: {name}_scale_and_zero: expected contiguous bfloat16, float16 or float32 {list(shape)}, got "
            f"{kind_of(scales)}"
        )
    return n, k


def _check(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale_and_zero: torch.Tensor,
    w2: torch.Tensor,
    w2_scale_and_zero: torch.Tensor,
    group_size: int,
    intermediate: int,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
) -> None:
    experts, k, _ = check_weights("int4_moe", w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate)
    check_tokens("int4_moe", hidden_states, topk_weights, topk_ids, w13, k)
    for name, bias, columns in (("w13_bias", w13_bias, 2 * intermediate), ("w2_bias", w2_bias, k)):
        if bias is None:
            continue
        expect("int4_moe", name, bias, torch.float32, (experts, columns))
        if bias.device != w13.device:
            raise ValueError(f"int4_moe: {name}: expected the device of w13, {w13.device}, got {bias.device}")


OPERATOR = torch.ops.untorch.int4_moe.default
