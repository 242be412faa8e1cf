"""Launches the kernels of recurrent layers. Grids come from shapes, which may be symbols, and never from values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.gated_delta_rule import NORM_EPSILON
from untorch.ops.linear_attention.kernels import causal_conv1d_kernel, gated_delta_rule_kernel

__all__ = ["MOST_WIDTH", "launch_causal_conv1d", "launch_gated_delta_rule"]

Wrap = Callable[[Any], Any]

MOST_WIDTH = 512  # of a key: a program has its rows of the state in registers
_STATE_ELEMENTS = 4096  # of a program


def _block(width: int, most: int) -> int:
    """The lanes for that many elements: a power of two from 16 on."""
    return min(most, max(16, 1 << (width - 1).bit_length()))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if its last dimension lies together in memory, or a copy."""
    last = tensor.dim() - 1
    known = statically_known_true(tensor.stride(last) == 1) or statically_known_true(tensor.shape[last] == 1)
    return tensor if known else tensor.contiguous()


def launch_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: torch.Tensor,
    silu: bool,
    wrap: Wrap,
) -> torch.Tensor:
    """``untorch::causal_conv1d`` on a GPU; ``wrap`` makes a kernel traceable. offset: int64, one element."""
    x, weight = _dense(x), weight.contiguous()
    tokens, sequences, channels = x.shape[0], state_slots.shape[0], int(x.shape[1])
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    block = _block(channels, 128)
    wrap(causal_conv1d_kernel)[((sequences + 1) * -(-channels // block),)](
        x, weight, weight if bias is None else bias, states, state_slots, cu_seqlens_q, seqlens_k, offset, out,
        x.stride(0), states.stride(0), tokens, sequences, states.shape[0],
        CHANNELS=channels, WIDTH=int(weight.shape[1]), BIAS=bias is not None, SILU=silu, BLOCK_T=16, BLOCK_C=block,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def launch_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: torch.Tensor,
    l2norm: bool,
    scale: float,
    wrap: Wrap,
) -> torch.Tensor:
    """``untorch::gated_delta_rule`` on a GPU; ``wrap`` makes a kernel traceable. offset: int64, one element."""
    q, k, v, g = _dense(q), _dense(k), _dense(v), g.contiguous()
    beta = None if beta is None else beta.contiguous()
    sequences = state_slots.shape[0]
    heads, heads_k, width, width_v = int(v.shape[1]), int(q.shape[1]), int(q.shape[2]), int(v.shape[2])
    out = torch.empty((v.shape[0], heads, width_v), dtype=v.dtype, device=v.device)
    block_k = _block(width, MOST_WIDTH)
    block_v = _block(width_v, max(16, _STATE_ELEMENTS // block_k))
    wrap(gated_delta_rule_kernel)[((sequences + 1) * (heads * -(-width_v // block_v)),)](
        q, k, v, g, g if beta is None else beta, states, state_slots, cu_seqlens_q, seqlens_k, offset, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], states.stride(0), v.shape[0], sequences, states.shape[0],
        SCALE=scale, EPSILON=NORM_EPSILON, HEADS=heads, GROUP=heads // heads_k, WIDTH=width, WIDTH_V=width_v,
        CHANNEL_DECAY=g.dim() == 3, BETA=beta is not None, L2NORM=l2norm, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
