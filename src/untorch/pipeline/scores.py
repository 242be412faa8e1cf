"""From logits to labels with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ACTIVATIONS", "activate", "activation_of", "best", "sigmoid", "softmax"]


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Over the last dimension."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    found: NDArray[Any] = weights / weights.sum(-1, keepdims=True)
    return found


def sigmoid(logits: NDArray[Any]) -> NDArray[Any]:
    """1 / (1 + exp(-x)), without overflow."""
    found: NDArray[Any] = 0.5 * (1 + np.tanh(0.5 * logits))
    return found


ACTIVATIONS = ("softmax", "sigmoid", "none")


def activation_of(options: Mapping[str, Any], settings: Settings) -> str:
    """What a call asks for, or else the model's. Raises InvalidArgumentError for names that there are not."""
    name = options.get("function_to_apply")
    if name is None:
        name = settings.get("activation", str)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InvalidArgumentError(f"pipeline: function_to_apply: expected {', '.join(ACTIVATIONS)}, got {name!r:.80}")
    return name


def activate(logits: NDArray[Any], name: str) -> NDArray[Any]:
    """Scores by one of ACTIVATIONS."""
    return softmax(logits) if name == "softmax" else sigmoid(logits) if name == "sigmoid" else logits


def best(scores: NDArray[Any], labels: Sequence[str], top_k: int | None) -> list[dict[str, Any]]:
    """The highest scores [width], falling; None: all of them."""
    order = np.argsort(-scores, kind="stable")[:top_k]
    return [{"label": labels[index], "score": float(scores[index])} for index in order]
