"""From logits to labels with scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ACTIVATIONS", "activate", "best", "sigmoid", "softmax"]


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


def activate(logits: NDArray[Any], name: Any) -> NDArray[Any]:
    """Scores by the activation of this name. Raises InvalidArgumentError for another one."""
    if name not in ACTIVATIONS:
        raise InvalidArgumentError(f"pipeline: function_to_apply: expected {', '.join(ACTIVATIONS)}, got {name!r:.80}")
    return softmax(logits) if name == "softmax" else sigmoid(logits) if name == "sigmoid" else logits


def best(scores: NDArray[Any], labels: Sequence[str], top_k: int | None) -> list[dict[str, Any]]:
    """The highest scores [width], falling; None: all of them."""
    order = np.argsort(-scores, kind="stable")[:top_k]
    return [{"label": labels[index], "score": float(scores[index])} for index in order]
