"""``untorch::gated_delta_rule``: linear attention with a decaying state, for sequences of any lengths in one batch.

Each value head keeps a matrix S [width, width_v] of its sequence. A token does

    S ← exp(g) · S                       g: one number (Gated DeltaNet), or one of each row (Kimi Delta Attention)
    S ← S + k ⊗ beta · (v - kᵀ S)        the delta rule; without beta S ← S + k ⊗ v (Mamba-2's state space)
    out = scale · qᵀ S

q and k [tokens, heads_k, width] serve heads / heads_k value heads each, one behind the other; with ``l2norm`` both are
divided by the root of their sum of squares + 1e-6 first. v [tokens, heads, width_v], g [tokens, heads] or [tokens,
heads, width] and beta [tokens, heads], these two in float32. The states [heads, width, width_v] are in ``states``
(ops/states.py). Tokens behind the last sequence give zeros. The implementation here is the reference; libuntorch.so has
the fast one.

Gated DeltaNet: Yang, Kautz and Hatamizadeh, arXiv:2412.06464.
"""

from __future__ import annotations

from typing import Any

import torch

from untorch.ops.states import DTYPES, check_states, runs

__all__ = ["C_SHIM", "NORM_EPSILON", "OPERATOR", "check_delta_rule", "gated_delta_rule"]

NORM_EPSILON = 1e-6

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_gated_delta_rule(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, "
    "AtenTensorHandle g, AtenTensorHandle* beta, AtenTensorHandle states, AtenTensorHandle state_slots, "
    "AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k, int64_t offset, int32_t l2norm, double scale, "
    "AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::gated_delta_rule", mutates_args=("states",))
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: int,
    l2norm: bool,
    scale: float,
) -> torch.Tensor:
    """[tokens, heads, width_v], in v's dtype. Raises ValueError."""
    check_delta_rule(q, k, v, g, beta, states, state_slots, cu_seqlens_q, seqlens_k, offset)
    heads, width, width_v = v.shape[1], q.shape[2], v.shape[2]
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    queries, keys = q.float(), k.float()
    if l2norm:
        queries, keys = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (queries, keys)
        )  # fmt: skip
    queries, keys = (x.repeat_interleave(heads // q.shape[1], 1)[..., None] for x in (queries * scale, keys))
    decay = (g if g.dim() == 3 else g[..., None]).exp()[..., None]
    values = v.float()[:, :, None]
    for begin, end, slot, begins in runs("gated_delta_rule", states.shape[0], state_slots, cu_seqlens_q, seqlens_k):
        state = v.new_zeros((heads, width, width_v), dtype=torch.float32)
        kept = None if slot < 0 else states[slot, offset : offset + state.numel()].view(state.shape)
        if kept is not None and not begins:
            state = kept.clone()
        for t in range(begin, end):
            state = state * decay[t]
            change = values[t]
            if beta is not None:
                change = (change - (keys[t] * state).sum(-2, keepdim=True)) * beta[t, :, None, None]
            state = state + keys[t] * change
            out[t] = (queries[t] * state).sum(-2)
        if kept is not None:
            kept.copy_(state)
    return out


@gated_delta_rule.register_fake
def _gated_delta_rule_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
    check_delta_rule(q, k, v, *others[:7])
    return v.new_empty(tuple(v.shape))


def check_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: int,
) -> None:
    """Raises ValueError for shapes, dtypes and numbers that do not fit together."""
    if v.dtype not in DTYPES or v.dim() != 3:
        raise ValueError(
            "gated_delta_rule: v: expected float32, bfloat16 or float16 [tokens, heads, width_v], got "
            f"{v.dtype} {tuple(v.shape)}"
        )
    heads = v.shape[1]
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dtype != v.dtype or tensor.dim() != 3 or tuple(tensor.shape[1:]) != tuple(q.shape[1:]):
            raise ValueError(
                f"gated_delta_rule: {name}: expected {v.dtype} [tokens, heads_k, width], the same for q and k, got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    if heads % q.shape[1]:
        raise ValueError(f"gated_delta_rule: {heads} heads do not divide into {q.shape[1]} key heads")
    rates = {"g": (g, ([heads], [heads, q.shape[2]])), "beta": (beta, ([heads],))}
    for name, (rate, shapes) in rates.items():
        if rate is not None and (rate.dtype != torch.float32 or list(rate.shape[1:]) not in shapes):
            expected = " or ".join(f"[tokens, {', '.join(map(str, shape))}]" for shape in shapes)
            raise ValueError(
                f"gated_delta_rule: {name}: expected torch.float32 {expected}, got {rate.dtype} {tuple(rate.shape)}"
            )
    needed = heads * q.shape[2] * v.shape[2]
    check_states("gated_delta_rule", states, state_slots, cu_seqlens_q, seqlens_k, offset, needed)


OPERATOR = torch.ops.untorch.gated_delta_rule.default
