"""The option ``quantize``: methods' modules copied with their tensors shared, the copies quantised, and described."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from untorch.export.compile import MethodInput, TracedMethod
from untorch.export.errors import CompileError
from untorch.export.options import QuantizeOptions
from untorch.export.passes.attributes import attribute
from untorch.export.passes.calls import arguments_of
from untorch.export.progress import Progress
from untorch.ops.int4 import OPERATOR
from untorch.ops.int4_layout import K_TILE, N_TILE
from untorch.quant.apply import Quantizer
from untorch.quant.linear import Int4Linear
from untorch.quant.modules import module_nbytes
from untorch.quant.report import QuantizationReport
from untorch.quant.select import linears
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["describe_quantized", "quantize_methods", "quantized_module"]


def quantize_methods(
    methods: Sequence[MethodInput],
    wanted: Mapping[str, QuantizeOptions],
    progress: Progress,
    device: str | None = None,
    *,
    by_name: bool = True,
) -> tuple[list[MethodInput], dict[str, QuantizationReport]]:
    """The methods, those in ``wanted`` with a quantised copy of their module, and a report for each of these.

    A weight that several methods use is quantised once for all that do it alike. ``device`` computes, if given; the
    copies lie where the modules do. Unless the caller named the methods, those without a linear layer stay as they are,
    with a report that says so, if others have some. Raises InvalidArgumentError, or CompileError where a module cannot
    be copied.
    """
    if wanted and not by_name and not any(_has_linears(method) for method in methods):
        raise InvalidArgumentError("option quantize: no method has a linear layer")
    quantizers: dict[tuple[str, int, str], Quantizer] = {}
    result, reports = [], {}
    for method in methods:
        options = wanted.get(method.name)
        if options is None:
            result.append(method)
            continue
        if not isinstance(method.model, nn.Module):
            raise InvalidArgumentError(
                f"method {method.name!r}: option quantize: an ExportedProgram has no modules to replace: quantise the "
                f"module with untorch.quant.quantize before torch.export.export"
            )
        if not by_name and not _has_linears(method):
            size = module_nbytes(method.model)
            reports[method.name] = QuantizationReport((), {}, size, size)
            result.append(method)
            continue
        kind = options.dtype, options.group_size, options.method
        if kind not in quantizers:
            quantizers[kind] = Quantizer(
                options.dtype, group_size=options.group_size, method=options.method, device=device
            )
        model = _shallow_copy(method.name, method.model)
        with progress.step(f"{method.name}: quantise") as show, torch.no_grad():
            try:
                report = quantizers[kind].apply(model, options.include, options.exclude, on_layer=show)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"method {method.name!r}: {error}") from error
        reports[method.name] = report
        result.append(dataclasses.replace(method, model=quantizers[kind].replacement(model) or model))
    return result, reports


def quantized_module(name: str, model: Any, options: QuantizeOptions, by_name: bool) -> Any:
    """A quantised copy of the module of the method ``name``, to see its operators: by the quickest method.

    What is no module is returned as it is, or refused as ``quantize_methods`` does.
    """
    method = MethodInput(name, model, ())
    if not isinstance(model, nn.Module | torch.export.ExportedProgram) or not (by_name or _has_linears(method)):
        return model
    options = dataclasses.replace(options, method="rtn")
    [method], _ = quantize_methods([method], {name: options}, Progress(False))
    return method.model


def describe_quantized(traced: TracedMethod) -> list[dict[str, Any]]:
    """The int4 weights that a method multiplies with, for the manifest: one entry each, in the graph's order."""
    found: dict[str, dict[str, Any]] = {}
    for node in traced.module.graph.nodes:
        if node.op != "call_function" or node.target != OPERATOR:
            continue
        arguments = arguments_of(node)
        packed, scale_and_zero = arguments["weight"], arguments["scale_and_zero"]
        if not all(isinstance(part, fx.Node) and part.op == "get_attr" for part in (packed, scale_and_zero)):
            continue  # computed by the model
        tensors = [attribute(traced.module, str(part.target)) for part in (packed, scale_and_zero)]
        name = str(packed.target).removesuffix(".packed_weight")
        tiles, outer, _, words = tensors[0].shape
        layer = _submodule(traced.method.model, name)
        found[str(packed.target)] = {
            "name": name,
            "dtype": "int4",
            "group_size": arguments["group_size"],
            "packed_shape": [tiles * N_TILE, outer * words * 2 * K_TILE],
            **({} if layer is None else {"shape": [layer.out_features, layer.in_features], "method": layer.method}),
            "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        }
    return list(found.values())


def _has_linears(method: MethodInput) -> bool:
    """An exported program may have some, for all that is known here."""
    return not isinstance(method.model, nn.Module) or bool(linears(method.model))


def _submodule(model: object, name: str) -> Int4Linear | None:
    if not isinstance(model, nn.Module):
        return None
    try:
        found = model.get_submodule("" if name == "packed_weight" else name)
    except AttributeError:
        return None
    return found if isinstance(found, Int4Linear) else None


def _shallow_copy(name: str, model: nn.Module) -> nn.Module:
    """A copy with modules of its own and the same parameters and buffers."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CompileError(
            f"method {name!r}: option quantize works on a copy of the model, which cannot be made ({error}): quantise "
            f"it yourself, untorch.quant.quantize(model), and leave the option out"
        ) from error
