"""A method of a model as a model of its own, to export several methods of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Bound(nn.Module):
    """Calls ``model.name``."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self.model, self.name)(x)
