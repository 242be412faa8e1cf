"""Activations that packed linear layers and convolutions apply themselves, by the names of their C functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

__all__ = ["ACTIVATIONS", "activate"]

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}

ACTIVATIONS = tuple(_FUNCTIONS)


def activate(y: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of that name, by PyTorch."""
    return _FUNCTIONS[activation](y)
