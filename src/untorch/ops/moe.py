"""What the references of ``nvfp4_moe`` and ``int4_moe`` share: tokens by expert, and the activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops.describe import kind_of

__all__ = ["check_ids", "check_numbers", "check_tokens", "expect", "run_experts"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def run_experts(
    caller: str,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    gate_up: Callable[[torch.Tensor, int], Sequence[torch.Tensor]],
    down: Callable[[torch.Tensor, int], torch.Tensor],
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    alpha: float,
    beta: float,
    limit: float | None,
) -> torch.Tensor:
    """The weighted sum of each token's experts; ``gate_up`` and ``down`` are an expert's GEMMs, in float32 or float64.

    It reads the ids on the CPU. Raises ValueError that begins with ``caller`` for ids of no expert.
    """
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    x, weights, top_k = hidden_states.to(wide), topk_weights.to(wide).flatten(), topk_ids.shape[1]
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    # A pair is a token and one of its experts.
    ordered, pairs = topk_ids.flatten().sort(stable=True)
    ids, counts = torch.unique_consecutive(ordered, return_counts=True)
    check_ids(caller, ids.tolist(), experts)
    for expert, chosen in zip(ids.tolist(), torch.split(pairs, counts.tolist()), strict=True):
        if expert < 0:
            continue
        tokens = chosen // top_k
        gate, up = gate_up(x[tokens], expert)
        if w13_bias is not None:
            lower, upper = w13_bias[expert].chunk(2)
            gate, up = gate + lower, up + upper
        rows = down(_swiglu(gate, up, alpha, beta, limit), expert)
        if w2_bias is not None:
            rows = rows + w2_bias[expert]
        y.index_add_(0, tokens, rows * weights[chosen, None])
    return y.to(hidden_states.dtype)


def check_ids(caller: str, ids: list[int], experts: int) -> None:
    """Raises ValueError for an id that is neither an expert's nor -1."""
    if wrong := [i for i in ids if not -1 <= i < experts]:
        raise ValueError(
            f"{caller}: topk_ids: expected experts from 0 to {experts - 1}, or -1 for none, got {min(wrong)}"
        )


def check_tokens(
    caller: str,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    k: int,
) -> None:
    """What both operators take beside weights of K inputs. Raises ValueError that begins with ``caller``."""
    if hidden_states.dtype not in _DTYPES or hidden_states.dim() != 2 or hidden_states.shape[1] != k:
        raise ValueError(
            f"{caller}: hidden_states: expected bfloat16, float16, float32 or float64 [tokens, {k}], the weights' K, "
            f"got {kind_of(hidden_states)}"
        )
    stride = hidden_states.stride(-1)  # one that varies cannot be judged before the call
    if isinstance(stride, int) and stride != 1:
        raise ValueError(
            f"{caller}: hidden_states: expected a contiguous last dimension, got the stride {stride}: copy it"
        )
    if topk_weights.dim() != 2:
        raise ValueError(f"{caller}: topk_weights: expected float32 [tokens, top_k], got {kind_of(topk_weights)}")
    shape = (hidden_states.shape[0], topk_weights.shape[1])
    expect(caller, "topk_weights", topk_weights, torch.float32, shape)
    expect(caller, "topk_ids", topk_ids, torch.int32, shape)
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids), ("w13", w13)):
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"{caller}: {name}: expected the device of hidden_states, {hidden_states.device}, got {tensor.device}"
            )


def expect(caller: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError for a tensor that is not contiguous, of this dtype, and of one of the shapes."""
    if tuple(tensor.shape) not in shapes or tensor.dtype != dtype or not tensor.is_contiguous():
        kinds = " or ".join(str(list(shape)) for shape in shapes)
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(f"{caller}: {name}: expected contiguous {expected} {kinds}, got {kind_of(tensor)}")


def check_numbers(caller: str, alpha: float, beta: float, limit: float | None) -> None:
    """The activation's numbers. Raises ValueError that begins with ``caller``."""
    for name, number in (("swiglu_alpha", alpha), ("swiglu_beta", beta)):
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise ValueError(f"{caller}: {name}: expected a finite number of float32, got {number}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{caller}: swiglu_limit: expected a number above 0, or None for no limit, got {limit}")


def _swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float | None) -> torch.Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    # SiLU has a function of its own, which rounds otherwise.
    activated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return activated * (up if beta == 0.0 else up + beta)
