"""A warning for modules in training mode: the file would keep what their layers do there."""

from __future__ import annotations

import warnings
from typing import Any

import torch

__all__ = ["warn_if_training"]

_SHOWN = 4


def warn_if_training(name: str, model: Any) -> None:
    """Warns if the module has layers that compute something else in training mode, and are in it."""
    if not isinstance(model, torch.nn.Module):
        return
    found: dict[str, list[str]] = {}
    for place, module in model.named_modules():
        if module.training and (kind := _kind(module)) is not None:
            found.setdefault(kind, []).append(place or type(module).__name__)
    if not found:
        return
    listed = "; ".join(
        f"{kind} ({', '.join(places[:_SHOWN])}{f' and {len(places) - _SHOWN} more' if len(places) > _SHOWN else ''})"
        for kind, places in found.items()
    )
    warnings.warn(
        f"export: method {name!r}: the model is in training mode, and the file will compute as in training: {listed}. "
        f"Call model.eval() before the export, unless that is meant",
        UserWarning,
        stacklevel=3,
    )


def _kind(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm | torch.nn.modules.instancenorm._InstanceNorm):
        return "batch statistics instead of running ones" if module.track_running_stats else None
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return "dropout" if module.p else None
    if isinstance(module, torch.nn.RNNBase | torch.nn.MultiheadAttention):
        return "dropout" if module.dropout else None
    if isinstance(module, torch.nn.RReLU):
        return "random slopes"
    return None
