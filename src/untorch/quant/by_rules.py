"""Quantising a module by rules: one ``Quantizer`` for each way, and one report of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from untorch.quant.modules import module_nbytes
from untorch.quant.options import QuantizeOptions
from untorch.quant.quantizer import Quantizer
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.rules import Assignment, layers_of
from untorch.quant.schemes import Target
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Quantizers", "quantize_by_rules", "quantizer_for"]


class Quantizers(dict[tuple[object, ...], Quantizer]):
    """By what makes one way of quantising; modules that share weights share them. keep: as of ``Quantizer``."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.keep = keep


def quantizer_for(
    quantizers: Quantizers, options: QuantizeOptions, device: str | torch.device | None = None, target: Target = "cpu"
) -> Quantizer:
    """The one of ``options`` for ``target``, made if it is missing."""
    kind = options.dtype, options.group_size, options.method, options.prefill, target
    if kind not in quantizers:
        quantizers[kind] = Quantizer(
            options.dtype, group_size=options.group_size, method=options.method, prefill=options.prefill, device=device,
            target=target, keep=quantizers.keep,
        )  # fmt: skip
    return quantizers[kind]


def quantize_by_rules(
    module: nn.Module,
    assignment: Assignment,
    quantizers: Quantizers,
    on_layer: Callable[[str], None],
    device: str | torch.device | None = None,
    allow_nothing: bool = False,
    target: Target = "cpu",
) -> tuple[nn.Module, QuantizationReport]:
    """Quantises ``module`` in place; gives it, or what replaces it where it is a linear layer itself, and the report.

    ``target``: as for ``Quantizer``. Raises InvalidArgumentError: nothing is left to quantise, unless
    ``allow_nothing``.
    """
    start, before = time.perf_counter(), module_nbytes(module)
    found = layers_of(module)
    order = {name: i for i, (_, names) in enumerate(found) for name in names}
    skipped = {names[0]: assignment.reason_to_skip(part) for part, names in found}
    layers: list[LayerReport] = []
    root = module
    for index, (_, options) in enumerate(assignment.rules):
        if options is None or not (only := assignment.layers(index)):
            continue
        quantizer = quantizer_for(quantizers, options, device, target)
        report = quantizer.apply(
            module, on_layer=on_layer, only=only, even_if_larger=index in assignment.named, embeddings=True
        )
        layers += report.layers
        skipped |= report.skipped
        root = quantizer.replacement(module) or root
    skipped = {name or "(the module itself)": reason for name, reason in skipped.items() if reason}
    if not layers and not allow_nothing:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise InvalidArgumentError(f"quantize: nothing to quantise: {reasons or 'the module has no linear layer'}")
    # A layer that a later rule quantised does not read the weight any more.
    readers = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    readers |= {name for name, _ in root.named_buffers(remove_duplicate=False)}
    layers = [replace(layer, kept_by=tuple(name for name in layer.kept_by if name in readers)) for layer in layers]
    last = len(order)
    layers.sort(key=lambda layer: order.get(layer.names[0], order.get(layer.names[0].rpartition(".")[0], last)))
    return root, QuantizationReport(tuple(layers), skipped, before, module_nbytes(root), time.perf_counter() - start)
