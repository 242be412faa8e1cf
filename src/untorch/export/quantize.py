"""The option ``quantize``: methods' modules copied with their tensors shared, the copies quantised, and described."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from untorch.export.coverage import FIRST_WITH_FP8, FIRST_WITH_INT8, sm_number
from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.passes.attributes import attribute
from untorch.export.passes.calibration import CalibrationPlan
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.merge_linears import MERGED
from untorch.export.passes.quantize_int4_activations import REPACKED
from untorch.export.signature import dtype_name
from untorch.export.streaming import on_disk
from untorch.export.target import CpuTarget
from untorch.export.target import Target as CompileTarget
from untorch.ops import int4, int4_moe, int8, int8_convolution, nvfp4, nvfp4_moe, w8a8
from untorch.ops.int4_layout import K_TILE, N_TILE
from untorch.ops.int8_layout import INT8_BLOCK, INT8_GROUP
from untorch.ops.nvfp4_layout import BLOCK_SIZE
from untorch.progress import Progress
from untorch.quant.by_rules import Quantizers, quantize_by_rules, quantizer_for
from untorch.quant.experts import experts_of
from untorch.quant.exposed import expose_linears, has_hidden_linears, restore_plain
from untorch.quant.int8 import Int8Linear
from untorch.quant.linear import Int4Linear
from untorch.quant.modules import module_nbytes
from untorch.quant.nvfp4_linear import NVFP4Linear
from untorch.quant.options import QuantizeOptions
from untorch.quant.report import QuantizationReport
from untorch.quant.rules import Assignment, QuantizeRules, layers_of
from untorch.quant.schemes import QuantizedLinear, Target
from untorch.quant.select import convolutions, left_convolutions, linears
from untorch.quant.smooth import smoothing_factors
from untorch.quant.w8a8 import DTYPES as W8A8_DTYPES
from untorch.quant.w8a8 import W8A8Linear
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "describe_convolutions",
    "describe_merged",
    "describe_quantized",
    "describe_repacked",
    "quantize_methods",
    "quantized_module",
    "serves_fp8",
    "shallow_copy",
]

# The operators, their dtype ("": by that of the values), and which arguments are a weight, the packed values first.
_WEIGHT_ARGUMENTS = {
    int4.OPERATOR: ("int4", (("weight", "scale_and_zero"),)),
    int8.OPERATOR: ("int8", (("weight", "scale", "column_sums"),)),
    int4_moe.OPERATOR: ("int4", (("w13", "w13_scale_and_zero"), ("w2", "w2_scale_and_zero"))),
    nvfp4.OPERATOR: ("nvfp4", (("weight_packed", "block_scale", "global_scale"),)),
    nvfp4_moe.OPERATOR: ("nvfp4", (("w13", "w13_scale", "w13_global"), ("w2", "w2_scale", "w2_global"))),
    w8a8.OPERATOR: ("", (("weight", "scale"),)),
}
# Those that quantize_int4_activations makes others of.
_REPACKED_OPERATORS = {"int4_linear": "w4a8_linear", "nvfp4_linear": "nvfp4_int8_linear"}
# What layers call the tensor of their values.
_VALUES = ("packed_weight", "weight_values")


def quantize_methods(
    methods: Sequence[Method],
    wanted: Mapping[str, QuantizeOptions | QuantizeRules],
    progress: Progress,
    device: str | None = None,
    *,
    by_name: bool = True,
    target: Target | None = None,
) -> list[Method]:
    """The methods; those in ``wanted`` have a quantised copy of their module, and ``quantization`` says what was done.

    A weight that several methods use is quantised once for all that do it alike. ``device`` computes, if given; the
    copies lie where the modules do. Unless the caller named the methods, those without a linear layer stay as they are,
    with a report that says so, if others have some; and a pattern of ``QuantizeRules`` need match in one of them only.
    ``target``: the type of the device that the layers are for, whatever the methods' targets are. Raises
    InvalidArgumentError, or CompileError where a module cannot be copied.
    """
    methods = _exposed(methods, wanted)
    if wanted and not by_name and not any(_has_layers(method, wanted) for method in methods):
        raise InvalidArgumentError("option quantize: no method has a linear layer or experts")
    quantizers = Quantizers(keep=on_disk)
    # A method's targets have one model, and so have methods of one model that is quantised alike.
    done: dict[tuple[object, ...], tuple[nn.Module, QuantizationReport]] = {}
    result = []
    for method in methods:
        options = wanted.get(method.name)
        if options is not None:
            layers_for: Target = target or method.target.device  # type: ignore[assignment]
            _check_method(method, options, layers_for)
            key = id(method.model), id(options), layers_for
            if key not in done:
                if isinstance(options, QuantizeRules):
                    sharing = [each for each in methods if wanted.get(each.name) is options]
                    done[key] = _quantize_by_rules(method, options, sharing, quantizers, progress, device, layers_for)
                else:
                    done[key] = _quantize(method, options, quantizers, progress, device, by_name, layers_for)
            model, report = done[key]
            plan = _plan(method, options)
            method = dataclasses.replace(method, model=model, quantization=report, calibration=plan)
        result.append(method)
    return result


def _exposed(methods: Sequence[Method], wanted: Mapping[str, QuantizeOptions | QuantizeRules]) -> list[Method]:
    """The methods; those that are quantised, and whose modules hide linear layers, with a copy that exposes them."""
    made: dict[int, nn.Module] = {}
    result = []
    for method in methods:
        model = method.model
        if method.name in wanted and isinstance(model, nn.Module):
            if id(model) not in made:
                hides = has_hidden_linears(model)
                made[id(model)] = expose_linears(shallow_copy(method.name, model)) if hides else model
            if made[id(model)] is not model:
                method = dataclasses.replace(method, model=made[id(model)])
        result.append(method)
    return result


def _check_method(method: Method, options: QuantizeOptions | QuantizeRules, target: Target) -> None:
    if not isinstance(method.model, nn.Module):
        raise InvalidArgumentError(
            f"method {method.name!r}: option quantize: an ExportedProgram has no modules to replace: quantise the "
            f"module with untorch.quant.quantize before torch.export.export"
        )
    if isinstance(options, QuantizeOptions) and (reason := _unserved(method, options, target)):
        raise InvalidArgumentError(f"method {method.name!r}: option quantize: {reason}")


def _unserved(method: Method, options: QuantizeOptions, target: Target) -> str:
    """Why the method's target has no layers of that kind, or ""."""
    if target == "cpu":
        if options.dtype == "fp8":
            return (
                "fp8 is for GPUs, and the method is for the CPU: take 'int8', 'int4' or 'nvfp4', or export it for a "
                "GPU with device='cuda'"
            )
        return ""
    if options.calibration is not None:
        return (
            f"calibration: static ranges are for CPUs, and the method is for {target}: leave calibration, observer and "
            f"smooth out, as rows of activations are rounded when a layer runs"
        )
    architecture = method.target.architecture
    first = {"fp8": FIRST_WITH_FP8, "int8": FIRST_WITH_INT8}.get(options.dtype, 0)
    if sm_number(architecture) < first:
        others = "'int8', 'int4' or 'nvfp4'" if options.dtype == "fp8" else "floating point"
        return (
            f"{options.dtype} needs a GPU of sm_{first} or newer, and the method is for {architecture}: take {others}"
        )
    return ""


def serves_fp8(architecture: str | None) -> bool:
    """Whether GPUs of the architecture multiply in FP8; True for one that is not known."""
    return sm_number(architecture) >= FIRST_WITH_FP8


def _quantize(
    method: Method,
    options: QuantizeOptions,
    quantizers: Quantizers,
    progress: Progress,
    device: str | None,
    by_name: bool,
    target: Target,
) -> tuple[nn.Module, QuantizationReport]:
    assert isinstance(method.model, nn.Module)
    found = convolutions(method.model) if options.dtype == "int8" else []
    static = options.calibration is not None
    left = {} if static else dict.fromkeys(_first_names(found), _WHY_NO_CONVOLUTIONS[target])
    if not by_name and not _has_linears(method) and not (static and found):
        size = module_nbytes(method.model)
        return method.model, QuantizationReport((), left, size, size)
    quantizer = quantizer_for(quantizers, options, device, target)
    model = shallow_copy(method.name, method.model)
    with progress.step(f"{method.name}: quantise") as show, torch.no_grad():
        try:
            smooth = None
            if options.smooth is not None:
                smooth = smoothing_factors(model, options.smooth, options.calibration, show)
            report = quantizer.apply(
                model,
                options.include,
                options.exclude,
                on_layer=show,
                others=found if static else (),
                embeddings=options.embeddings,
                smooth=smooth,
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"method {method.name!r}: {error}") from error
    if left:
        report = dataclasses.replace(report, skipped={**report.skipped, **left})
    return quantizer.replacement(model) or restore_plain(model), report


def _quantize_by_rules(
    method: Method,
    rules: QuantizeRules,
    sharing: Sequence[Method],
    quantizers: Quantizers,
    progress: Progress,
    device: str | None,
    target: Target,
) -> tuple[nn.Module, QuantizationReport]:
    """``sharing``: the methods, this one among them, whose layers the patterns name."""
    assert isinstance(method.model, nn.Module)
    layers = {id(part): (part, names) for each in sharing if isinstance(each.model, nn.Module)
              for part, names in layers_of(each.model)}  # fmt: skip
    model = shallow_copy(method.name, method.model)
    with progress.step(f"{method.name}: quantise") as show, torch.no_grad():
        try:
            assigned = rules.assign(list(layers.values()))
            # By the ids of the copy's layers, which are in the same order.
            copies = zip(layers_of(method.model), layers_of(model), strict=True)
            of_layer = {
                id(copied): assigned.of_layer[id(part)]
                for (part, _), (copied, _) in copies
                if id(part) in assigned.of_layer
            }
            passed_over = frozenset(
                id(copied)
                for (part, _), (copied, _) in zip(layers_of(method.model), layers_of(model), strict=True)
                if id(part) in assigned.passed_over
            )
            assignment = Assignment(assigned.rules, of_layer, assigned.named, passed_over)
            for part, names in layers_of(model):
                options = assigned.rules[of_layer[id(part)]][1] if id(part) in of_layer else None
                if options is None or isinstance(part, nn.Embedding):
                    continue
                if reason := _unserved(method, options, target):
                    raise InvalidArgumentError(f"{names[0]}: option quantize: {reason}")
            model, report = quantize_by_rules(model, assignment, quantizers, show, device, len(sharing) > 1, target)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"method {method.name!r}: {error}") from error
    if any(options.dtype == "int8" for options in rules.options()):
        why = "convolutions get static ranges, which patterns of layers do not have: give 'calibration' for all"
        why = why if target == "cpu" else _WHY_NO_CONVOLUTIONS[target]
        left = dict.fromkeys(_first_names(convolutions(method.model)), why)
        report = dataclasses.replace(report, skipped={**report.skipped, **left})
    return restore_plain(model), report


_WHY_NO_CONVOLUTIONS = {
    "cpu": "convolutions need static ranges: give 'calibration', batches of inputs",
    "cuda": "convolutions stay in floating point: those in int8 are for CPUs",
}


def _first_names(found: Sequence[tuple[nn.Module, list[str]]]) -> list[str]:
    return [names[0] or "(the module itself)" for _, names in found]


def _plan(method: Method, options: QuantizeOptions | QuantizeRules) -> CalibrationPlan | None:
    """What the method is calibrated with, from its module as it is before quantising."""
    if isinstance(options, QuantizeRules) or options.calibration is None:
        return None
    assert isinstance(method.model, nn.Module)
    return CalibrationPlan(options, left_convolutions(method.model, options.include, options.exclude))


def quantized_module(
    name: str,
    model: Any,
    options: QuantizeOptions | QuantizeRules,
    by_name: bool,
    others: Sequence[nn.Module] = (),
    target: CompileTarget | None = None,
) -> Any:
    """A quantised copy of the module of the method ``name``, to see its operators: by the quickest method.

    What is no module is returned as it is, or refused as ``quantize_methods`` does. ``others``: modules of other
    methods, whose layers ``QuantizeRules`` may name. ``target``: what the method is compiled for; None: this CPU.
    """
    method = Method(name, model, (), target=target or CpuTarget())
    if not isinstance(model, nn.Module | torch.export.ExportedProgram):
        return model
    if not (by_name or _has_linears(method) or (isinstance(model, nn.Module) and has_hidden_linears(model))):
        return model
    if isinstance(options, QuantizeRules):
        rules = tuple((p, each and dataclasses.replace(each, method="rtn")) for p, each in options.rules)
        sharing = [method, *(Method("", other, ()) for other in others)]
        method, *_ = sharing = _exposed(sharing, dict.fromkeys(("", name), options))
        layers_for: Target = method.target.device  # type: ignore[assignment]
        return _quantize_by_rules(
            method, QuantizeRules(rules), sharing, Quantizers(keep=on_disk), Progress(False), None, layers_for
        )[0]
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
            name = str(packed.target)
            for values in _VALUES:
                name = name.removesuffix(f".{values}")
            layer = _submodule(method.model, name)
            found[str(packed.target)] = {
                "name": name,
                "dtype": dtype or W8A8_DTYPES[tensors[0].dtype],
                "group_size": _group_size(dtype, arguments, tensors),
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


def describe_repacked(entries: Sequence[dict[str, Any]], method: Method) -> list[dict[str, Any]]:
    """The entries after the passes, of those that quantize_int4_activations repacked with their new tensors."""
    made = {names[0]: tensors for names, tensors in method.module.meta.get(REPACKED, ())}
    changed = []
    for entry in entries:
        tensors = made.get(entry["tensors"][0])
        if tensors is not None:
            tensors = *tensors, *entry["tensors"][len(tensors) :]  # experts keep their global scales
            stored = [attribute(method.module, name) for name in tensors]
            panels, words, columns = stored[0].shape
            entry = entry | {
                "operator": _REPACKED_OPERATORS.get(entry["operator"], entry["operator"]),
                "tensors": list(tensors),
                "packed_shape": [panels * columns, 8 * words],
                "int8_activations": True,
                "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in stored),
            }
        changed.append(entry)
    return changed


def _operator_name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _group_size(dtype: str, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> int:
    """The inputs that share a scale; in int8 without groups all of them, and in fp8 without blocks."""
    if not dtype and tensors[1].dim() == 2:
        return w8a8.SCALE_BLOCK
    if dtype in ("int8", ""):
        groups = tensors[1].shape[0] if tensors[1].dim() == 2 else 1
        return int(arguments["x"].meta["val"].shape[-1]) // groups
    return int(arguments.get("group_size", BLOCK_SIZE))


def _prefill(arguments: Mapping[str, Any]) -> dict[str, str]:
    prefill = arguments.get("prefill", "exact")
    return {} if prefill == "exact" else {"prefill": prefill}


def _packed_shape(packed: torch.Tensor) -> list[int]:
    """[n, k] of a weight in tiles, in bytes, or in NVFP4's bytes; of experts all of their rows."""
    if packed.dtype in W8A8_DTYPES and packed.dim() == 2:
        return list(packed.shape)
    if packed.dim() <= 3:
        return [packed.shape[:-1].numel(), 2 * packed.shape[-1]]
    tiles, outer, _, words = packed.shape
    if packed.dtype == torch.int8:
        return [tiles * INT8_BLOCK, outer * INT8_GROUP]
    return [tiles * N_TILE, outer * words * 2 * K_TILE]


def _has_linears(method: Method) -> bool:
    """Linear layers or experts. An exported program may have some, for all that is known here."""
    return not isinstance(method.model, nn.Module) or bool(linears(method.model) or experts_of(method.model))


def _has_layers(method: Method, wanted: Mapping[str, QuantizeOptions | QuantizeRules]) -> bool:
    """Linear layers, experts, convolutions that are calibrated, or embeddings that patterns may name."""
    options = wanted.get(method.name)
    if isinstance(options, QuantizeRules) and isinstance(method.model, nn.Module) and layers_of(method.model):
        return True
    static = isinstance(options, QuantizeOptions) and options.calibration is not None
    return _has_linears(method) or (static and bool(convolutions(method.model)))  # type: ignore[arg-type]


def _submodule(model: object, name: str) -> QuantizedLinear | None:
    if not isinstance(model, nn.Module):
        return None
    try:
        found = model.get_submodule("" if name in _VALUES else name)
    except AttributeError:
        return None
    return found if isinstance(found, Int4Linear | Int8Linear | NVFP4Linear | W8A8Linear) else None


def shallow_copy(name: str, model: nn.Module) -> nn.Module:
    """A copy with modules of its own and the same parameters and buffers."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CompileError(
            f"method {name!r}: option quantize works on a copy of the model, which cannot be made ({error}): quantise "
            f"it yourself, untorch.quant.quantize(model), and leave the option out"
        ) from error
