"""A package's method that chooses tokens on the GPU, from the logits of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from untorch.ops.sampling.operator import OPERATOR

__all__ = ["NAME", "choose_method"]

NAME = "choose"


class Choose(nn.Module):
    """forward(logits [R, V], rows [S], temperature, top_k, top_p, min_p, uniform [S]) → tokens [S], int64."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """As ``untorch::choose_tokens``."""
        tokens: torch.Tensor = OPERATOR(logits, rows, temperature, top_k, top_p, min_p, uniform, self.vocabulary)
        return tokens


def choose_method(vocabulary: int, width: int) -> dict[str, Any]:
    """For logits of that width."""
    from torch.export import Dim

    rows, tokens = Dim("rows", min=1, max=1 << 20), Dim("tokens", min=1, max=1 << 20)
    each = torch.ones(3)
    args = (torch.zeros(4, width), torch.arange(3), each, torch.arange(3), each, each * 0, each * 0.5)
    return {
        "model": Choose(vocabulary), "args": args, "dynamic_shapes": ({0: rows}, *([{0: tokens}] * 6)),
    }  # fmt: skip
