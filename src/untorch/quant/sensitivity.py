"""How much of a model's outputs changes when a single layer is quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from untorch.quant.by_rules import Quantizers, quantize_by_rules
from untorch.quant.modules import device_type
from untorch.quant.options import QuantizeOptions
from untorch.quant.rules import Assignment, layers_of
from untorch.quant.schemes import Target, check_target
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["layer_sensitivity"]


def layer_sensitivity(
    module: nn.Module,
    options: str | Mapping[str, Any] | QuantizeOptions,
    batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    on_layer: Callable[[str], None] = lambda name: None,
    target: Target | None = None,
) -> dict[str, float]:
    """The relative error of the outputs for each layer, when it alone is quantised: ‖y' − y‖ / ‖y‖, by its first name.

    The norms are Frobenius norms over all floating-point outputs of all batches, in evaluation mode. Layers that cannot
    be quantised are left out, and a layer that no batch reaches has 0. ``module`` stays as it is. ``include``,
    ``exclude`` and ``calibration`` of the options are not read.

    batches: (args, kwargs) of calls. target: "cpu" or "cuda", as for ``quantize``.

    Raises InvalidArgumentError: there is no batch, or outputs are not finite.
    """
    options = QuantizeOptions.read(options)
    if target is not None:
        check_target(target)
    target = target or device_type(module)
    if not batches:
        raise InvalidArgumentError("layer_sensitivity: batches: expected at least one (args, kwargs), got none")

    def copied() -> nn.Module:
        # With the same parameters; buffers that the model writes are each copy's own.
        return copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()}).eval()

    quantizers = Quantizers()
    found: dict[str, float] = {}
    with torch.no_grad():
        plain = copied()
        expected = [_outputs(plain, *batch) for batch in batches]
        whole = sum(float(value.double().square().sum()) for values in expected for value in values)
        if not whole < float("inf"):
            raise InvalidArgumentError("layer_sensitivity: batches: the outputs in floating point are not finite")
        for index, (layer, names) in enumerate(layers_of(module)):
            if isinstance(layer, nn.Embedding) and not options.embeddings:
                continue
            on_layer(names[0])
            changed = copied()
            part = layers_of(changed)[index][0]
            rule = Assignment((("*", options),), {id(part): 0}, frozenset({0}))
            changed, report = quantize_by_rules(
                changed, rule, quantizers, lambda name: None, allow_nothing=True, target=target
            )
            if not report.layers:
                continue
            wrong = 0.0
            for batch, values in zip(batches, expected, strict=True):
                for value, now in zip(values, _outputs(changed, *batch), strict=True):
                    wrong += float((now.double() - value.double()).square().sum())
            found[names[0]] = (wrong / whole) ** 0.5 if whole else 0.0 if not wrong else float("inf")
    return found


def _outputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(module(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
