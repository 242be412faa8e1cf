"""Arguments of operators over a state pool: sequences that begin, go on and are padding, in shuffled slots."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tables(
    lengths: list[tuple[int, int]], needed: int, offset: int, g: torch.Generator, without_slot: bool = False
) -> dict[str, Any]:
    """For sequences of (tokens, positions); the pool is full of what came before. without_slot: the last one."""
    slots = torch.randperm(len(lengths) + 2, generator=g)[: len(lengths)].to(torch.int32)
    if without_slot:
        slots[-1] = -1
    ends = torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0).to(torch.int32)
    return {
        "states": torch.randn(len(lengths) + 2, offset + needed + 3, generator=g), "state_slots": slots,
        "cu_seqlens_q": ends, "seqlens_k": torch.tensor([length for _, length in lengths], dtype=torch.int32),
        "offset": offset,
    }  # fmt: skip


def conv_batch(
    lengths: list[tuple[int, int]],
    channels: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    offset: int = 0,
    seed: int = 0,
    without_slot: bool = False,
) -> dict[str, Any]:
    """Of ``untorch::causal_conv1d``; padding: tokens behind the last sequence."""
    g = torch.Generator().manual_seed(seed)
    total = sum(tokens for tokens, _ in lengths) + padding
    return {
        "x": torch.randn(total, channels, generator=g).to(dtype),
        "weight": torch.randn(channels, width, generator=g).to(dtype),
        "bias": torch.randn(channels, generator=g).to(dtype),
        **tables(lengths, channels * (width - 1), offset, g, without_slot), "silu": True,
    }  # fmt: skip


def delta_batch(
    lengths: list[tuple[int, int]],
    heads: int,
    heads_k: int,
    width: int,
    width_v: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    offset: int = 0,
    seed: int = 0,
    without_slot: bool = False,
) -> dict[str, Any]:
    """Of ``untorch::gated_delta_rule``, with one decay a head, beta and norms."""
    g = torch.Generator().manual_seed(seed)
    total = sum(tokens for tokens, _ in lengths) + padding
    common = tables(lengths, heads * width * width_v, offset, g, without_slot)
    return {
        "q": torch.randn(total, heads_k, width, generator=g).to(dtype),
        "k": torch.randn(total, heads_k, width, generator=g).to(dtype),
        "v": torch.randn(total, heads, width_v, generator=g).to(dtype),
        "g": -torch.rand(total, heads, generator=g), "beta": torch.rand(total, heads, generator=g), **common,
        "l2norm": True, "scale": width**-0.5,
    }  # fmt: skip


def channel_decays(given: dict[str, Any]) -> dict[str, Any]:
    """One decay a row of the state, as Kimi Delta Attention has them."""
    generator = torch.Generator().manual_seed(1)
    return {**given, "g": -torch.rand((*given["v"].shape[:2], given["q"].shape[2]), generator=generator)}


def without_beta(given: dict[str, Any]) -> dict[str, Any]:
    """No delta rule, as in Mamba-2; without norms, so keys are scaled down."""
    return {**given, "beta": None, "l2norm": False, "k": given["k"] / 8}
