"""What ``untorch::attention`` computes, with torch's own operators: on the CPU, and for tests."""

from __future__ import annotations

import math

import torch

__all__ = ["attention_reference"]


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    """softmax(q · kᵀ · scale + mask) · v, computed in float32 or, for float64, in that; rows without a key give zeros.

    q [batch, heads, queries, width], k [batch, heads_kv, keys, width], v [batch, heads_kv, keys, width_v].
    """
    batch, heads, queries, width = q.shape
    heads_kv, keys, width_v = k.shape[1], k.shape[2], v.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).reshape(batch, heads_kv, heads // heads_kv, queries, width)
    scores = grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2)
    scores = scores.reshape(batch, heads, queries, keys) * (1 / math.sqrt(width) if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if causal:
        visible = torch.ones((queries, keys), dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, -1) if keys else scores
    weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    result = weights.reshape(batch, heads_kv, heads // heads_kv, queries, keys) @ v.to(wide).unsqueeze(2)
    return result.reshape(batch, heads, queries, width_v).to(q.dtype)
