"""``untorch::nvfp4_moe``: a mixture of experts, each a gated MLP, whose weights are stored in NVFP4.

    y[m] = Σ_j topk_weights[m, j] · (W2[e] · act + b2[e])    with e = topk_ids[m, j]
    (gate, up) = W13[e] · x[m] + b13[e]
    act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g)    with g = min(gate, limit)

Without biases, alpha 1, beta 0 and no limit are SiLU: act = silu(gate) · up. gpt-oss has biases, 1.702, 1 and 7. A
weight is w = value · block_scale · global_scale: values are E2M1 (sign in bit 3, then 0, 0.5, 1, 1.5, 2, 3, 4, 6),
two in a byte, the even one of the last dimension in the low half; a block is 16 of them. In W13 the rows of the gate
come first, then those of up.

libuntorch.so computes it, for torch's tensors as in files (``native``). The reference here, which makes the weights of
one expert after the other in float32, is for the dtypes and devices that the library does not serve.

Graphs hold the operator as one node: no pass and no constant folding sees a weight that is unpacked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.nvfp4_layout import BLOCK_SIZE, dequantize_nvfp4

__all__ = ["C_SHIMS", "OPERATOR", "check_swiglu", "check_weights", "nvfp4_moe", "nvfp4_moe_reference"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

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
    w13, w2: uint8 [E, 2·I, K / 2] and [E, K, I / 2], contiguous; I a multiple of 16.
    w13_scale, w2_scale: float8_e4m3fn [E, 2·I, K / 16] and [E, K, I / 16], contiguous: the blocks' scales.
    w13_global: float32 [E], or [E, 2] for gate and up apart, contiguous. It multiplies.
    w2_global: float32 [E], contiguous.
    w13_bias, w2_bias: float32 [E, 2·I], the gate's before those of up, and [E, K], contiguous; None: none.
    swiglu_alpha, swiglu_beta: finite numbers of float32.
    swiglu_limit: above 0; None: none.

    Sums are in float32, for float64 in that; so is the activation between the two GEMMs, but on a GPU, where act is
    rounded to hidden_states' dtype. Raises ValueError; RuntimeError for what the GPU cannot do. On the CPU ids of no
    expert are refused; on a GPU they count as -1, and the next operator of the library reports them.
    """
    _check(hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global)
    check_swiglu("nvfp4_moe", w13, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit)
    if topk_ids.numel() and native.serves("nvfp4_moe", hidden_states):
        if not topk_ids.is_cuda:
            _check_ids(topk_ids.flatten().tolist(), w13.shape[0])
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
    experts, width, top_k = w13.shape[0], w13.shape[1] // 2, topk_ids.shape[1]
    x, weights = hidden_states.to(wide), topk_weights.to(wide).flatten()
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    # A pair is a token and one of its experts.
    ordered, pairs = topk_ids.flatten().sort(stable=True)
    ids, counts = torch.unique_consecutive(ordered, return_counts=True)
    _check_ids(ids.tolist(), experts)
    halves = w13_global if w13_global.dim() == 2 else w13_global[:, None].expand(experts, 2)
    for expert, chosen in zip(ids.tolist(), torch.split(pairs, counts.tolist()), strict=True):
        if expert < 0:
            continue
        tokens = chosen // top_k
        packed, scale = w13[expert].reshape(2, width, -1), w13_scale[expert].reshape(2, width, -1)
        gate, up = (x[tokens] @ matrix.T for matrix in dequantize_nvfp4(packed, scale, halves[expert], wide))
        if w13_bias is not None:
            gate, up = gate + w13_bias[expert, :width], up + w13_bias[expert, width:]
        down = dequantize_nvfp4(w2[expert], w2_scale[expert], w2_global[expert], wide)
        rows = _swiglu(gate, up, swiglu_alpha, swiglu_beta, swiglu_limit) @ down.T
        if w2_bias is not None:
            rows = rows + w2_bias[expert]
        y.index_add_(0, tokens, rows * weights[chosen, None])
    return y.to(hidden_states.dtype)


def _check_ids(ids: list[int], experts: int) -> None:
    if wrong := [i for i in ids if not -1 <= i < experts]:
        raise ValueError(
            f"nvfp4_moe: topk_ids: expected experts from 0 to {experts - 1}, or -1 for none, got {min(wrong)}"
        )


def _swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float | None) -> torch.Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    # SiLU has a function of its own, which rounds otherwise.
    activated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return activated * (up if beta == 0.0 else up + beta)


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
    _check(hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global)
    check_swiglu("nvfp4_moe", w13, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit)
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
    if w13.dtype != torch.uint8 or w13.dim() != 3 or w13.shape[1] % 2 or not w13.is_contiguous():
        raise ValueError(f"{caller}: w13: expected contiguous uint8 [experts, 2·I, K / 2], got {kind_of(w13)}")
    experts, rows, half = w13.shape
    k, width = 2 * half, rows // 2
    if k % BLOCK_SIZE or width % BLOCK_SIZE or not k or not width:
        raise ValueError(
            f"{caller}: w13: expected K and I to be multiples of {BLOCK_SIZE}, got K = {k} and I = {width}"
        )
    _expect(caller, "w13_scale", w13_scale, torch.float8_e4m3fn, (experts, rows, k // BLOCK_SIZE))
    _expect(caller, "w2", w2, torch.uint8, (experts, k, width // 2))
    _expect(caller, "w2_scale", w2_scale, torch.float8_e4m3fn, (experts, k, width // BLOCK_SIZE))
    _expect(caller, "w13_global", w13_global, torch.float32, (experts,), (experts, 2))
    _expect(caller, "w2_global", w2_global, torch.float32, (experts,))
    for name, tensor in (
        ("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale), ("w13_global", w13_global),
        ("w2_global", w2_global),
    ):  # fmt: skip
        if tensor.device != w13.device:
            raise ValueError(f"{caller}: {name}: expected the device of w13, {w13.device}, got {tensor.device}")
    return experts, k, width


def check_swiglu(
    caller: str,
    w13: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    alpha: float,
    beta: float,
    limit: float | None,
) -> None:
    """The biases and numbers of ``nvfp4_moe``, beside a w13 that ``check_weights`` has passed.

    Raises ValueError that begins with ``caller`` and names the argument.
    """
    experts, rows, half = w13.shape
    for name, bias, columns in (("w13_bias", w13_bias, rows), ("w2_bias", w2_bias, 2 * half)):
        if bias is None:
            continue
        _expect(caller, name, bias, torch.float32, (experts, columns))
        if bias.device != w13.device:
            raise ValueError(f"{caller}: {name}: expected the device of w13, {w13.device}, got {bias.device}")
    for name, number in (("swiglu_alpha", alpha), ("swiglu_beta", beta)):
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise ValueError(f"{caller}: {name}: expected a finite number of float32, got {number}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{caller}: swiglu_limit: expected a number above 0, or None for no limit, got {limit}")


def _check(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *weights: torch.Tensor
) -> None:
    _, k, _ = check_weights("nvfp4_moe", *weights)
    if hidden_states.dtype not in _DTYPES or hidden_states.dim() != 2 or hidden_states.shape[1] != k:
        raise ValueError(
            f"nvfp4_moe: hidden_states: expected bfloat16, float16, float32 or float64 [tokens, {k}], the weights' K, "
            f"got {kind_of(hidden_states)}"
        )
    stride = hidden_states.stride(-1)  # one that varies cannot be judged before the call
    if isinstance(stride, int) and stride != 1:
        raise ValueError(
            f"nvfp4_moe: hidden_states: expected a contiguous last dimension, got the stride {stride}: copy it"
        )
    if topk_weights.dim() != 2:
        raise ValueError(f"nvfp4_moe: topk_weights: expected float32 [tokens, top_k], got {kind_of(topk_weights)}")
    shape = (hidden_states.shape[0], topk_weights.shape[1])
    _expect("nvfp4_moe", "topk_weights", topk_weights, torch.float32, shape)
    _expect("nvfp4_moe", "topk_ids", topk_ids, torch.int32, shape)
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids), ("w13", weights[0])):
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"nvfp4_moe: {name}: expected the device of hidden_states, {hidden_states.device}, got {tensor.device}"
            )


def _expect(caller: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in shapes or tensor.dtype != dtype or not tensor.is_contiguous():
        kinds = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{caller}: {name}: expected contiguous {_name(dtype)} {kinds}, got {kind_of(tensor)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


OPERATOR = torch.ops.untorch.nvfp4_moe.default
