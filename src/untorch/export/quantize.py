"""The option ``quantize``: methods' modules copied with their tensors shared, the copies quantised, and described."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.passes.attributes import attribute
from untorch.export.passes.calibration import CalibrationPlan
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.merge_linears import MERGED
from untorch.export.signature import dtype_name
from untorch.ops import int4, int8, int8_convolution, nvfp4, nvfp4_moe
from untorch.ops.int4_layout import K_TILE, N_TILE
from untorch.ops.int8_layout import INT8_BLOCK, INT8_GROUP
from untorch.ops.nvfp4_layout import BLOCK_SIZE
from untorch.progress import Progress
from untorch.quant.apply import Quantizer
from untorch.quant.int8 import Int8Linear
from untorch.quant.linear import Int4Linear
from untorch.quant.modules import module_nbytes
from untorch.quant.nvfp4_linear import NVFP4Linear
from untorch.quant.options import QuantizeOptions
from untorch.quant.report import QuantizationReport
from untorch.quant.schemes import QuantizedLinear
from untorch.quant.select import convolutions, left_convolutions, linears
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["describe_convolutions", "describe_merged", "describe_quantized", "quantize_methods", "quantized_module"]

# The operators, their dtype, and which of their arguments are a weight, the packed values first.
_WEIGHT_ARGUMENTS = {
    int4.OPERATOR: ("int4", (("weight", "scale_and_zero"),)),
    int8.OPERATOR: ("int8", (("weight", "scale", "column_sums"),)),
    nvfp4.OPERATOR: ("nvfp4", (("weight_packed", "block_scale", "global_scale"),)),
    nvfp4_moe.OPERATOR: ("nvfp4", (("w13", "w13_scale", "w13_global"), ("w2", "w2_scale", "w2_global"))),
}


def quantize_methods(
    methods: Sequence[Method],
    wanted: Mapping[str, QuantizeOptions],
    progress: Progress,
    device: str | None = None,
    *,
    by_name: bool = True,
) -> list[Method]:
    """The methods; those in ``wanted`` have a quantised copy of their module, and ``quantization`` says what was done.

    A weight that several methods use is quantised once for all that do it alike. ``device`` computes, if given; the
    copies lie where the modules do. Unless the caller named the methods, those without a linear layer stay as they are,
    with a report that says so, if others have some. Raises InvalidArgumentError, or CompileError where a module cannot
    be copied.
    """
    if wanted and not by_name and not any(_has_layers(method, wanted) for method in methods):
        raise InvalidArgumentError("option quantize: no method has a linear layer")
    quantizers: dict[tuple[object, ...], Quantizer] = {}
    done: dict[str, tuple[nn.Module, QuantizationReport]] = {}  # by name: a method's targets have one model
    result = []
    for method in methods:
        options = wanted.get(method.name)
        if options is not None:
            if method.name not in done:
                done[method.name] = _quantize(method, options, quantizers, progress, device, by_name)
            model, report = done[method.name]
            plan = _plan(method, options)
            method = dataclasses.replace(method, model=model, quantization=report, calibration=plan)
        result.append(method)
    return result


def _quantize(
    method: Method,
    options: QuantizeOptions,
    quantizers: dict[tuple[object, ...], Quantizer],
    progress: Progress,
    device: str | None,
    by_name: bool,
) -> tuple[nn.Module, QuantizationReport]:
    if not isinstance(method.model, nn.Module):
        raise InvalidArgumentError(
            f"method {method.name!r}: option quantize: an ExportedProgram has no modules to replace: quantise the "
            f"module with untorch.quant.quantize before torch.export.export"
        )
    if options.dtype == "int8" and method.target.device != "cpu":
        raise InvalidArgumentError(
            f"method {method.name!r}: option quantize: int8 is for CPUs, and the method is for {method.target.device}: "
            f"take 'int4' or 'nvfp4', or export it for the CPU"
        )
    found = convolutions(method.model) if options.dtype == "int8" else []
    static = options.calibration is not None
    if not by_name and not _has_linears(method) and not (static and found):
        size = module_nbytes(method.model)
        return method.model, QuantizationReport((), _without_calibration(found), size, size)
    kind = options.dtype, options.group_size, options.method, options.prefill
    if kind not in quantizers:
        quantizers[kind] = Quantizer(
            options.dtype,
            group_size=options.group_size,
            method=options.method,
            prefill=options.prefill,
            device=device,
        )
    model = _shallow_copy(method.name, method.model)
    with progress.step(f"{method.name}: quantise") as show, torch.no_grad():
        try:
            report = quantizers[kind].apply(
                model, options.include, options.exclude, on_layer=show, others=found if static else ()
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"method {method.name!r}: {error}") from error
    if not static:
        report = dataclasses.replace(report, skipped={**report.skipped, **_without_calibration(found)})
    return quantizers[kind].replacement(model) or model, report


def _without_calibration(found: Sequence[tuple[nn.Module, list[str]]]) -> dict[str, str]:
    reason = "convolutions need static ranges: give 'calibration', batches of inputs"
    return {names[0] or "(the module itself)": reason for _, names in found}


def _plan(method: Method, options: QuantizeOptions) -> CalibrationPlan | None:
    """What the method is calibrated with, from its module as it is before quantising."""
    if options.calibration is None:
        return None
    assert isinstance(method.model, nn.Module)
    return CalibrationPlan(options, left_convolutions(method.model, options.include, options.exclude))


def quantized_module(name: str, model: Any, options: QuantizeOptions, by_name: bool) -> Any:
    """A quantised copy of the module of the method ``name``, to see its operators: by the quickest method.

    What is no module is returned as it is, or refused as ``quantize_methods`` does.
    """
    method = Method(name, model, ())
    if not isinstance(model, nn.Module | torch.export.ExportedProgram) or not (by_name or _has_linears(method)):
        return model
    options = dataclasses.replace(options, method="rtn")
    [method] = quantize_methods([method], {name: options}, Progress(False))
    return method.model


def describe_quantized(method: Method) -> list[dict[str, Any]]:
    """The quantised weights that a traced method's GEMMs read, for the manifest, in the graph's order."""
    found: dict[str, dict[str, Any]] = {}
    for node in method.module.graph.nodes:
        if node.op != "call_function" or node.target not in _WEIGHT_ARGUMENTS:
            continue
        dtype, weights = _WEIGHT_ARGUMENTS[node.target]
        arguments = arguments_of(node)
        for names in weights:
            parts = [arguments[name] for name in names]
            if not all(isinstance(part, fx.Node) and part.op == "get_attr" for part in parts):
                continue  # computed by the model
            tensors = [attribute(method.module, str(part.target)) for part in parts]
            packed = parts[0]
            name = str(packed.target).removesuffix(".packed_weight")
            layer = _submodule(method.model, name)
            found[str(packed.target)] = {
                "name": name,
                "dtype": dtype,
                "group_size": _group_size(dtype, arguments),
                "operator": _operator_name(node),
                "tensors": [str(part.target) for part in parts],
                "activations": dtype_name(node.meta["val"].dtype),
                "packed_shape": _packed_shape(tensors[0]),
                **_prefill(arguments),
                **({} if layer is None else {"shape": [layer.out_features, layer.in_features], "method": layer.method}),
                "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            }
    return list(found.values())


def describe_convolutions(method: Method) -> list[dict[str, Any]]:
    """The entries of the int8 convolutions, which passes make: after these."""
    found: dict[str, dict[str, Any]] = {}
    for node in method.module.graph.nodes:
        if node.op != "call_function" or node.target != int8_convolution.OPERATOR:
            continue
        arguments = arguments_of(node)
        parts = [arguments[name] for name in ("weight", "scale", "column_sums")]
        tensors = [attribute(method.module, str(part.target)) for part in parts]
        inputs = int(arguments["x"].meta["val"].shape[1]) // arguments["groups"] * math.prod(arguments["kernel"])
        rows = int(tensors[2].numel())
        found[str(parts[0].target)] = {
            "name": str(node.meta.get("weight_name", parts[0].target)).removesuffix(".weight"),
            "dtype": "int8",
            "group_size": inputs,
            "operator": _operator_name(node),
            "tensors": [str(part.target) for part in parts],
            "activations": dtype_name(arguments["x"].meta["val"].dtype),
            "packed_shape": [rows, int(tensors[0].numel()) // rows],
            "shape": [int(arguments["out_channels"]), inputs],
            **({"method": "rtn"} if "weight_name" in node.meta else {}),
            "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        }
    return list(found.values())


def describe_merged(entries: Sequence[dict[str, Any]], method: Method) -> list[dict[str, Any]]:
    """The entries of ``describe_quantized`` after the passes: one for layers that merge_linears made one of."""
    found = {entry["tensors"][0]: entry for entry in entries}
    for tensors, parts in method.module.meta.get(MERGED, ()):
        of_parts = [found.pop(names[0], None) for names in parts]
        known = [entry for entry in of_parts if entry is not None]
        if len(known) < len(of_parts):  # not quantised
            found |= {entry["tensors"][0]: entry for entry in known}
            continue
        first = known[0]
        merged = first | {
            "name": ", ".join(entry["name"] for entry in known),
            "tensors": list(tensors),
            "packed_shape": [sum(entry["packed_shape"][0] for entry in known), first["packed_shape"][1]],
            "nbytes": sum(entry["nbytes"] for entry in known),
        }
        if all("shape" in entry for entry in known):
            merged["shape"] = [sum(entry["shape"][0] for entry in known), first["shape"][1]]
            merged["method"] = ", ".join(dict.fromkeys(entry["method"] for entry in known))
        else:
            merged = {key: value for key, value in merged.items() if key not in ("shape", "method")}
        found[tensors[0]] = merged
    return list(found.values())


def _operator_name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _group_size(dtype: str, arguments: Mapping[str, Any]) -> int:
    """The inputs that share a scale; in int8 all of them."""
    if dtype == "int8":
        return int(arguments["x"].meta["val"].shape[-1])
    return int(arguments.get("group_size", BLOCK_SIZE))


def _prefill(arguments: Mapping[str, Any]) -> dict[str, str]:
    prefill = arguments.get("prefill", "exact")
    return {} if prefill == "exact" else {"prefill": prefill}


def _packed_shape(packed: torch.Tensor) -> list[int]:
    """[n, k] of a weight in tiles, or in NVFP4's bytes; of experts all of their rows."""
    if packed.dim() <= 3:
        return [packed.shape[:-1].numel(), 2 * packed.shape[-1]]
    tiles, outer, _, words = packed.shape
    if packed.dtype == torch.int8:
        return [tiles * INT8_BLOCK, outer * INT8_GROUP]
    return [tiles * N_TILE, outer * words * 2 * K_TILE]


def _has_linears(method: Method) -> bool:
    """An exported program may have some, for all that is known here."""
    return not isinstance(method.model, nn.Module) or bool(linears(method.model))


def _has_layers(method: Method, wanted: Mapping[str, QuantizeOptions]) -> bool:
    """Linear layers, or convolutions that are calibrated."""
    options = wanted.get(method.name)
    static = options is not None and options.calibration is not None
    return _has_linears(method) or (static and bool(convolutions(method.model)))  # type: ignore[arg-type]


def _submodule(model: object, name: str) -> QuantizedLinear | None:
    if not isinstance(model, nn.Module):
        return None
    try:
        found = model.get_submodule("" if name == "packed_weight" else name)
    except AttributeError:
        return None
    return found if isinstance(found, Int4Linear | Int8Linear | NVFP4Linear) else None


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
