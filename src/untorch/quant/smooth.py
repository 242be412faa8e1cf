"""SmoothQuant (Xiao et al., 2023): moves the outliers of activations into the weights, channel by channel.

y = (x / s) · (W · s)ᵀ with s_j = max|x_j|^α / max|W_j|^(1 − α), the maxima over calibration batches and over outputs.
α is the strength: 0 leaves all of the range to the activations, 1 moves all of it into the weights.

Where the batches have few rows, the largest value of a channel is smaller than that of rows to come, and s would shrink
the range that is left for them. So below ``FEW_ROWS`` rows, max|x_j| is at least the ``_FLOOR`` quantile over the
channels: outliers move into the weights as ever, and no other channel grows beside them.

Linear layers that read the same tensor, such as query, key and value, share s, so x / s is computed once. It is an
operator of its own, which Inductor fuses with what computes x: norms need not be changed, and may have other readers,
as in BERT.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from untorch.quant.select import embeddings_of, linears, tensor_key
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["FEW_ROWS", "smoothing_factors"]

_LEAST = 1e-5
FEW_ROWS = 512
_FLOOR = 0.9


def smoothing_factors(
    module: nn.Module, strength: float, batches: Iterable[Any], on_batch: Callable[[str], None] = lambda where: None
) -> dict[int, torch.Tensor]:
    """s, float32 [in_features], by the id of each linear layer that the batches reach.

    batches: each a tensor, a tuple of arguments or a dictionary of keyword arguments. Layers that share their weight
    with another one have none. ``module`` stays as it is. Warns of less than ``FEW_ROWS`` rows. Raises
    InvalidArgumentError: a batch does not run.
    """
    own = linears(module)
    weights = [*(part.weight for part, _ in own), *(part.weight for part, _ in embeddings_of(module))]
    keys = [tensor_key(weight) for weight in weights]
    # With the same parameters; buffers that the model writes are the copy's own.
    running = copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()}).eval()
    largest: dict[int, torch.Tensor] = {}
    rows: Counter[int] = Counter()
    groups: dict[int, int] = {}  # by the layer's place: the place of the first that reads the same tensor
    readers: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # ids must not be used again

    def observe(place: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if place not in groups:
                kept.append(x)
                groups[place] = readers.setdefault(id(x), place)
            seen = x.detach().reshape(-1, x.shape[-1]).float().abs().nan_to_num(0.0, 0.0, 0.0)
            now = seen.amax(0) if seen.shape[0] else seen.new_zeros(x.shape[-1])
            if groups[place] == place:
                rows[place] += seen.shape[0]
            before = largest.get(groups[place])
            largest[groups[place]] = now if before is None else torch.maximum(before, now)

        return hook

    handles = [
        part.register_forward_pre_hook(observe(place))
        for place, (part, _) in enumerate(linears(running))
        if type(part) is nn.Linear and keys.count(keys[place]) == 1
    ]
    try:
        with torch.no_grad():
            for number, batch in enumerate(batches, 1):
                on_batch(f"smooth: batch {number}")
                readers.clear()
                _call(running, batch, number)
                kept.clear()
    finally:
        for handle in handles:
            handle.remove()
    if largest and (fewest := min(rows[group] for group in largest)) < FEW_ROWS:
        warnings.warn(
            f"option quantize: smooth: the calibration batches give a layer {fewest} rows, which is too few to know "
            f"how large each channel becomes: give {FEW_ROWS} or more",
            stacklevel=2,
        )
    for group, values in largest.items():
        if 0 < rows[group] < FEW_ROWS:
            known = values[values > 0]
            floor = float(known.quantile(_FLOOR)) if known.numel() else 0.0
            largest[group] = torch.where(values > 0, values.clamp(min=floor), values)
    return {id(own[place][0]): factor for place, factor in _factors(own, groups, largest, strength).items()}


def _call(module: nn.Module, batch: Any, number: int) -> None:
    try:
        if isinstance(batch, Mapping):
            module(**batch)
        elif isinstance(batch, torch.Tensor):
            module(batch)
        else:
            module(*batch)
    except Exception as error:
        raise InvalidArgumentError(
            f"option quantize: calibration: batch {number} does not run through the model: {type(error).__name__}: "
            f"{error}"
        ) from error


def _factors(
    own: list[tuple[nn.Linear, list[str]]], groups: dict[int, int], largest: dict[int, torch.Tensor], strength: float
) -> dict[int, torch.Tensor]:
    weights: dict[int, torch.Tensor] = {}
    for place, group in groups.items():
        now = own[place][0].weight.detach().float().abs().amax(0).nan_to_num(0.0, 0.0, 0.0)
        weights[group] = torch.maximum(weights[group], now) if group in weights else now
    made = {}
    for group, weight in weights.items():
        x = largest[group].to(weight.device)
        factor = x.clamp(min=_LEAST).pow(strength) / weight.clamp(min=_LEAST).pow(1 - strength)
        made[group] = torch.where((x == 0) | (weight == 0), 1.0, factor).clamp(min=_LEAST)
    return {place: made[group] for place, group in groups.items()}
