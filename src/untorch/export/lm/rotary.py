"""Rotary embeddings whose frequencies depend on the batch: fixed for one model length, or refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError

__all__ = ["fix_rotary_embeddings"]


def fix_rotary_embeddings(model: nn.Module, max_positions: int) -> None:
    """LongRoPE gets the factors that a sequence of ``max_positions`` has, for all sequences.

    Raises CompileError for dynamic NTK scaling, where keys in the cache depend on the length at the time.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str):
                continue
            if "dynamic" in kind:
                raise CompileError(
                    f"{name}: its rotary embedding is scaled by dynamic NTK, which changes the keys of a sequence as "
                    "it grows: keys in a cache cannot change; choose another rope_type in the model's config"
                )
            if kind == "longrope":
                _fix_longrope(module, layer_type, max_positions)


def _fix_longrope(module: Any, layer_type: str | None, max_positions: int) -> None:
    keywords = {} if layer_type is None else {"layer_type": layer_type}
    position = torch.tensor([[max_positions - 1]])
    with torch.no_grad():
        module(torch.zeros(1, 1, 1), position, **keywords)  # sets the frequencies
    # "default" recomputes nothing; the frequencies and the attention factor stay.
    if layer_type is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}
