"""``swiglu_of``: the activation between the two GEMMs of a module of experts, found by evaluating its own function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["SwiGLU", "swiglu_of"]


@dataclass(frozen=True)
class SwiGLU:
    """(clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g) with g = min(gate, limit); as it is, silu(gate) · up.

    ``interleaved``: gate and up take turns, else the gate comes first.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    interleaved: bool = False

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Of two tensors of one shape."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.beta) * gate * torch.sigmoid(self.alpha * gate)


def swiglu_of(experts: nn.Module) -> SwiGLU | None:
    """None where it is something else.

    transformers' modules have it as ``_apply_gate``, with an alpha and a limit of theirs; without that, their act_fn
    must be a SiLU.
    """
    apply_gate = getattr(experts, "_apply_gate", None)
    if not callable(apply_gate):
        return SwiGLU() if type(getattr(experts, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation") else None
    alphas = [1.0, *_numbers(experts, "alpha", "swiglu_alpha")]
    limits = [limit for limit in _numbers(experts, "limit", "swiglu_limit") if limit > 0]
    # Both sides of every limit, so that none passes for another or for none.
    sizes = [0.0, 0.1, 0.7, 2.0, 9.0, *(factor * limit for limit in limits for factor in (0.9, 3.0))]
    values = torch.tensor([sign * size for sign in (1.0, -1.0) for size in sizes], dtype=torch.float64)
    gate, up = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    for interleaved in (False, True):
        given = torch.stack((gate, up), -1).flatten() if interleaved else torch.cat((gate, up))
        found = _called(apply_gate, given[None])
        if found is None or found.shape != (1, gate.numel()):
            return None
        for alpha, beta, limit in itertools.product(alphas, (0.0, 1.0), (None, *limits)):
            made = SwiGLU(alpha, beta, limit, interleaved)
            if torch.allclose(found[0].double(), made(gate, up), rtol=1e-5, atol=1e-6):
                return made
    return None


def _numbers(experts: nn.Module, *names: str) -> list[float]:
    values = [getattr(experts, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _called(function: Callable[..., Any], given: torch.Tensor) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            found = function(given)
    except Exception:  # transformers' function, which may raise anything
        return None
    return found if isinstance(found, torch.Tensor) and found.dtype.is_floating_point else None
