"""A package's methods that choose tokens on the GPU, from the logits of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from untorch.ops.sampling.operator import LOGPROBS, OPERATOR, Logprobs

__all__ = ["LOGPROBS_NAME", "NAME", "PROCESS_NAME", "choose_method", "logprobs_method", "process_method"]

NAME, PROCESS_NAME, LOGPROBS_NAME = "choose", "process_logits", "logprobs"


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


class ProcessLogits(nn.Module):
    """Penalties, bias and grammars: forward(logits [R, V], rows [S], masks [G, W], mask_rows [S], at, factor, shift
    [E]) → logits [S, V], of which each row is that of ``rows``.

    at: the row and the token as row * V + token, each once, or several times with the same change: a logit above 0 is
    divided by ``factor``, another one multiplied, and ``shift`` is added. masks: a bit a token, int32, 0 where it may
    not follow; ``mask_rows`` says which row is whose.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        masks: torch.Tensor,
        mask_rows: torch.Tensor,
        at: torch.Tensor,
        factor: torch.Tensor,
        shift: torch.Tensor,
    ) -> torch.Tensor:
        """The changed logits."""
        own = logits[rows]
        values = own.view(-1)[at]
        values = torch.where(values > 0, values / factor, values * factor) + shift
        own = own.view(-1).index_put((at,), values).view(own.shape)
        tokens = torch.arange(logits.shape[1], device=logits.device).clamp(max=self.vocabulary - 1)
        words = masks[mask_rows[:, None], (tokens >> 5)[None, :]]
        return torch.where((words >> (tokens & 31).to(torch.int32)) & 1 != 0, own, -torch.inf)


class TokenLogprobs(nn.Module):
    """forward(logits [R, V], rows, tokens, wanted [S]): as ``untorch::token_logprobs``."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(
        self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor
    ) -> Logprobs:  # fmt: skip
        """As ``untorch::token_logprobs``."""
        found: Logprobs = LOGPROBS(logits, rows, tokens, wanted, self.vocabulary)
        return found


def choose_method(vocabulary: int, width: int) -> dict[str, Any]:
    """For logits of that width."""
    rows, tokens = _dim("rows"), _dim("tokens")
    each = torch.ones(3)
    args = (torch.zeros(4, width), torch.arange(3), each, torch.arange(3), each, each * 0, each * 0.5)
    return {
        "model": Choose(vocabulary), "args": args, "dynamic_shapes": ({0: rows}, *([{0: tokens}] * 6)),
    }  # fmt: skip


def process_method(vocabulary: int, width: int) -> dict[str, Any]:
    """For logits of that width."""
    rows, tokens, masks, changes = _dim("rows"), _dim("tokens"), _dim("masks"), _dim("changes", 2)
    args = (
        torch.zeros(4, width), torch.arange(3), torch.full((2, -(-vocabulary // 32)), -1, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64), torch.arange(5), torch.ones(5), torch.zeros(5),
    )  # fmt: skip
    return {
        "model": ProcessLogits(vocabulary), "args": args,
        "dynamic_shapes": ({0: rows}, {0: tokens}, {0: masks}, {0: tokens}, *([{0: changes}] * 3)),
    }  # fmt: skip


def logprobs_method(vocabulary: int, width: int) -> dict[str, Any]:
    """For logits of that width."""
    rows, tokens = _dim("rows"), _dim("tokens")
    each = torch.arange(3)
    return {
        "model": TokenLogprobs(vocabulary), "args": (torch.zeros(4, width), each, each, each),
        "dynamic_shapes": ({0: rows}, *([{0: tokens}] * 3)),
    }  # fmt: skip


def _dim(name: str, least: int = 1) -> Any:
    from torch.export import Dim

    return Dim(name, min=least, max=1 << 20)
