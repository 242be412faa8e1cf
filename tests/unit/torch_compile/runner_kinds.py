"""Runners for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Scale:
    """x · factor."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.factor


class Experts:
    """The sum of a token's weights and ids, beside a matrix."""

    def __init__(self, k: int, n: int) -> None:
        self.weight = torch.randn(k, n)

    def run_moe(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.weight + (topk_weights * topk_ids).sum(-1, keepdim=True)


class Gives:
    """Whatever a function makes of x."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        self.run_linear = function
