"""``untorch::nvfp4_moe``: a mixture of experts, each a gated MLP, whose weights are stored in NVFP4.

    y[m] = Σ_j topk_weights[m, j] · (W2[e] · act + b2[e])    with e = topk_ids[m, j]
    (gate, up) = W13[e] · x[m] + b13[e]
    act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g)    with g = min(gate, limit)

Without biases, alpha 1, beta 0 and no limit are SiLU: act = silu(gate) · up. gpt-oss has biases, 1.702, 1 and 7. A
weight is w = value · block_scale · global_scale: values are E2M1 (sign in bit 3, then 0, 0.5, 1, 1.5, 2, 3, 4, 6),
two in a byte, the even one of the last dimension in the low half; a block is 16 of them. In W13 the rows of the gate
come first, then those of up.

On CPUs the rows of all experts below each other, [E · 2·I, K] and [E · K, I], may be packed as
``untorch::nvfp4_int8_linear`` has them instead, with K and I padded to multiples of 32: the inputs of both GEMMs are
then quantised to int8 in parts of 32.

libuntorch.so computes it, for torch's tensors as in files (``native``). The reference here, which makes the weights of
one expert after the other in float32, is for the dtypes and devices that the library does not serve.

Graphs hold the operator as one node: no pass and no constant folding sees a weight that is unpacked.
"""

from __future__ import annotations

import torch

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.moe import check_ids, check_numbers, check_tokens, expect, run_experts
from untorch.ops.nvfp4_layout import BLOCK_SIZE, dequantize_nvfp4, e2m1_values
from untorch.ops.w4a8 import W4A8_PART, quantize_parts
from untorch.ops.w4a8_layout import W4A8_BLOCK, unpack_nvfp4_w4a8

__all__ = ["C_SHIMS", "OPERATOR", "check_swiglu", "check_weights", "nvfp4_moe", "nvfp4_moe_reference"]

# AOTInductor declares all of them, and calls the one of the model's device.
C_SHIMS = [
    f"AOTITorchError aoti_torch_{device}_nvfp4_moe(AtenTensorHandle hidden_states, AtenTensorHandle topk_weights, "
    f"AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale, AtenTensorHandle w2, "
    f"AtenTensorHandle w2_scale, AtenTensorHandle w13_global, AtenTensorHandle w2_global, AtenTensorHandle* w13_bias, "
    f"AtenTensorHandle* w2_bias, double swiglu_alpha, double swiglu_beta, double* swiglu_limit, AtenTensorHandle* ret0)"
    for device in ("cpu", "cuda")
]


@torch.library.custom_op("untorch::nvfp4_moe", mutates_args=())
def nvfp4_moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_global: torch.Tensor,
    w2_global: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """The sum of each token's experts, by their weights; gives [M, K] in hidden_states' dtype, contiguous.

    hidden_states: bfloat16, float16, float32 or float64 [M, K], the last dimension contiguous; K a multiple of 16.
    topk_weights: float32 [M, top_k], contiguous.
    topk_ids: int32 [M, top_k], contiguous: experts from 0 to E - 1, or -1 for one that is elsewhere (expert
        parallelism), which adds nothing.
    w13, w2: uint8 [E, 2·I, K / 2] and [E, K, I / 2], contiguous; I a multiple of 16. Or int32, as ``pack_nvfp4_w4a8``
        gives them.
    w13_scale, w2_scale: float8_e4m3fn [E, 2·I, K / 16] and [E, K, I / 16], contiguous: the blocks' scales. Or packed.
    w13_global: float32 [E], or [E, 2] for gate and up apart, contiguous. It multiplies.
    w2_global: float32 [E], contiguous.
    w13_bias, w2_bias: float32 [E, 2·I], the gate's before those of up, and [E, K], contiguous; None: none.
    swiglu_alpha, swiglu_beta: finite numbers of float32.
    swiglu_limit: above 0; None: none.

    Sums are in float32, for float64 in that; so is the activation between the two GEMMs, but on a GPU, where act is
    rounded to hidden_states' dtype. Raises ValueError; RuntimeError for what the GPU cannot do. On the CPU ids of no
    expert are refused; on a GPU they count as -1, and the next operator of the library reports them.
    """
    sizes = _check(hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global)
    check_swiglu("nvfp4_moe", sizes, w13.device, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit)
    has_kernel = not topk_ids.is_cuda or w13.dtype == torch.uint8
    if topk_ids.numel() and has_kernel and native.serves("nvfp4_moe", hidden_states):
        if not topk_ids.is_cuda:
            check_ids("nvfp4_moe", topk_ids.flatten().tolist(), sizes[0])
        out = hidden_states.new_empty(hidden_states.shape)
        native.call(
            "nvfp4_moe", out, hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global,
            w2_global, (w13_bias,), (w2_bias,), swiglu_alpha, swiglu_beta, (swiglu_limit,),
        )  # fmt: skip
        return out
    return nvfp4_moe_reference(
        hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global, w13_bias, w2_bias,
        swiglu_alpha, swiglu_beta, swiglu_limit,
    )  # fmt: skip


def nvfp4_moe_reference(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_global: torch.Tensor,
    w2_global: torch.Tensor,
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
    experts, k, width = check_weights("nvfp4_moe", w13, w13_scale, w2, w2_scale, w13_global, w2_global)
    halves = w13_global if w13_global.dim() == 2 else w13_global[:, None].expand(experts, 2)

    def linear(
        x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, factors: torch.Tensor, expert: int, n: int
    ) -> torch.Tensor:
        """factors: the global scales of equal parts of the n outputs."""
        if packed.dtype == torch.int32:
            panels = slice(expert * n // W4A8_BLOCK, (expert + 1) * n // W4A8_BLOCK)
            codes, scales = unpack_nvfp4_w4a8(packed[panels], scale[panels], n)
            matrix = e2m1_values(codes, torch.float64) * scales.double().repeat_interleave(BLOCK_SIZE, 1)
            matrix *= factors.double().repeat_interleave(n // len(factors))[:, None]
            steps, part_scale = quantize_parts(x, codes.shape[1])
            return ((steps.double() * part_scale.double()).flatten(-2) @ matrix.T).to(wide)
        parts = (len(factors), n // len(factors), -1)
        matrices = dequantize_nvfp4(packed[expert].reshape(parts), scale[expert].reshape(parts), factors, wide)
        return torch.cat([x @ matrix.T for matrix in matrices], -1)

    return run_experts(
        "nvfp4_moe", hidden_states, topk_weights, topk_ids, experts,
        lambda x, expert: linear(x, w13, w13_scale, halves[expert], expert, 2 * width).chunk(2, -1),
        lambda x, expert: linear(x, w2, w2_scale, w2_global[expert, None], expert, k),
        w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit,
    )  # fmt: skip


@nvfp4_moe.register_fake
def _nvfp4_moe_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_global: torch.Tensor,
    w2_global: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    sizes = _check(hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global)
    check_swiglu("nvfp4_moe", sizes, w13.device, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit)
    return hidden_states.new_empty(hidden_states.shape)


def check_weights(
    caller: str,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_global: torch.Tensor,
    w2_global: torch.Tensor,
) -> tuple[int, int, int]:
    """(E, K, I) of weights as ``nvfp4_moe`` takes them, all on one device.

    Raises ValueError that begins with ``caller`` and names the argument.
    """
    if w13.dtype == torch.int32:
        experts, k, width = _packed_sizes(caller, w13, w13_scale, w2, w2_scale, w2_global)
    else:
        experts, k, width = _dense_sizes(caller, w13, w13_scale, w2, w2_scale)
    expect(caller, "w13_global", w13_global, torch.float32, (experts,), (experts, 2))
    expect(caller, "w2_global", w2_global, torch.float32, (experts,))
    for name, tensor in (
        ("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale), ("w13_global", w13_global),
        ("w2_global", w2_global),
    ):  # fmt: skip
        if tensor.device != w13.device:
            raise ValueError(f"{caller}: {name}: expected the device of w13, {w13.device}, got {tensor.device}")
    return experts, k, width


def _dense_sizes(
    caller: str, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> tuple[int, int, int]:
    if w13.dtype != torch.uint8 or w13.dim() != 3 or w13.shape[1] % 2 or not w13.is_contiguous():
        raise ValueError(f"{caller}: w13: expected contiguous uint8 [experts, 2·I, K / 2], got {kind_of(w13)}")
    experts, rows, half = w13.shape
    k, width = 2 * half, rows // 2
    if k % BLOCK_SIZE or width % BLOCK_SIZE or not k or not width:
        raise ValueError(
            f"{caller}: w13: expected K and I to be multiples of {BLOCK_SIZE}, got K = {k} and I = {width}"
        )
    expect(caller, "w13_scale", w13_scale, torch.float8_e4m3fn, (experts, rows, k // BLOCK_SIZE))
    expect(caller, "w2", w2, torch.uint8, (experts, k, width // 2))
    expect(caller, "w2_scale", w2_scale, torch.float8_e4m3fn, (experts, k, width // BLOCK_SIZE))
    return experts, k, width


def _packed_sizes(
    caller: str,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_global: torch.Tensor,
) -> tuple[int, int, int]:
    """Of the layout for integers. It pads K and I, but not the rows."""
    experts = w2_global.numel()
    for name, weight, unit in (("w13", w13, 2 * W4A8_BLOCK), ("w2", w2, W4A8_BLOCK)):
        rows = weight.shape[0] * W4A8_BLOCK if weight.dim() == 3 else 0
        if weight.dtype != torch.int32 or not weight.is_contiguous() or not rows * experts or rows % (unit * experts):
            raise ValueError(
                f"{caller}: {name}: expected contiguous int32 [rows / 16, K / 8, 16], with a multiple of {unit} rows "
                f"for each of {experts} experts, got {kind_of(weight)}"
            )
    k, width = w2.shape[0] * W4A8_BLOCK // experts, w13.shape[0] * W4A8_BLOCK // experts // 2
    for name, weight, scale, inputs in (("w13", w13, w13_scale, k), ("w2", w2, w2_scale, width)):
        panels, padded = weight.shape[0], -(-inputs // W4A8_PART) * W4A8_PART
        expect(caller, name, weight, torch.int32, (panels, padded // 8, W4A8_BLOCK))
        expect(caller, f"{name}_scale", scale, torch.float8_e4m3fn, (panels, padded // BLOCK_SIZE, W4A8_BLOCK))
    return experts, k, width


def check_swiglu(
    caller: str,
    sizes: tuple[int, int, int],
    device: torch.device,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    alpha: float,
    beta: float,
    limit: float | None,
) -> None:
    """The biases and numbers of ``nvfp4_moe``, beside weights whose sizes ``check_weights`` gave, on that device.

    Raises ValueError that begins with ``caller`` and names the argument.
    """
    experts, k, width = sizes
    for name, bias, columns in (("w13_bias", w13_bias, 2 * width), ("w2_bias", w2_bias, k)):
        if bias is None:
            continue
        expect(caller, name, bias, torch.float32, (experts, columns))
        if bias.device != device:
            raise ValueError(f"{caller}: {name}: expected the device of w13, {device}, got {bias.device}")
    check_numbers(caller, alpha, beta, limit)


def _check(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *weights: torch.Tensor
) -> tuple[int, int, int]:
    """The sizes, as ``check_weights`` gives them."""
    sizes = check_weights("nvfp4_moe", *weights)
    check_tokens("nvfp4_moe", hidden_states, topk_weights, topk_ids, weights[0], sizes[1])
    return sizes


OPERATOR = torch.ops.untorch.nvfp4_moe.default
