"""What ``untorch profile`` and ``untorch inspect --graph`` know of each kernel call: source lines, bytes, operations.

The generated code's calls are recorded while Inductor writes them, and stored as a small JSON entry of the archive.
Sizes are expressions in reverse Polish notation over the method's symbols, as in the manifest. Bytes are those of the
operands that a kernel reads and writes once; operations are 2·m·n·k of a GEMM, one an element of a pointwise operator.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from untorch.export.coverage import called_function, source_place
from untorch.export.passes.report import PassReport
from untorch.export.patches import CallSequence, LayerCall
from untorch.export.signature import to_rpn

__all__ = ["CALLS_FILE", "KernelCall", "describe_call", "read_calls", "write_calls"]

CALLS_FILE = "kernel_calls.json"

_VERSION = 1
_MAX_CALLS = 20000
_MAX_CHANGES = 200  # of a pass
_LINEAR = {
    "packed_linear", "int4_linear", "int8_linear", "nvfp4_int8_linear", "nvfp4_linear", "w4a8_linear", "w8a8_linear",
}  # fmt: skip
_CONVOLUTION = {"packed_convolution", "int8_convolution"}
_MOE = {"int4_moe", "nvfp4_moe"}  # three GEMMs of K · I for each pair of a token and an expert


@dataclass(frozen=True)
class KernelCall:
    """One call: its name, whether it is a C function, the operators and lines behind it, bytes and operations."""

    name: str
    is_function: bool
    operators: tuple[str, ...]
    lines: tuple[str, ...]
    module: str
    nbytes: Any
    operations: Any


def describe_call(node_schedule: Any, name: str, is_extern: bool) -> KernelCall | None:
    """The record of a call that Inductor generates. An operator that it cannot read has no bytes, and no error."""
    origins = _origins(node_schedule, is_extern)
    try:
        nbytes = _extern_bytes(node_schedule, origins) if is_extern else _fused_bytes(node_schedule)
        operations = _operations(origins)
    except Exception:  # Inductor's internals, for information alone
        nbytes = operations = None
    targets = dict.fromkeys(_operator_name(node) for node in origins if node.op == "call_function")
    places = dict.fromkeys(place for node in origins if (place := source_place(node)))
    modules = [module for node in origins if (module := _module(node))]
    return KernelCall(
        called_function(name),
        is_extern,
        tuple(targets),
        tuple(map(_short, places)),
        _common(modules),
        nbytes,
        operations,
    )


def write_calls(sequence: CallSequence, path: Path) -> None:
    """Writes what was recorded, with torch's symbols: the process that compiles may be another one."""
    if not 0 < len(sequence.calls) <= _MAX_CALLS:
        return
    lines: dict[str, int] = {}

    def expression(value: Any) -> Any:
        rpn = None if value is None else to_rpn(sympy.sympify(value))
        return rpn[0] if rpn is not None and len(rpn) == 1 and isinstance(rpn[0], int) else rpn

    first: dict[str, LayerCall] = {}

    def entries(calls: Iterable[Any]) -> list[Any]:
        return [layer(call) if isinstance(call, LayerCall) else entry(call) for call in calls]

    def layer(call: LayerCall) -> dict[str, Any]:
        modules = {inner.module for inner in sequence.layers.get(call.name, ()) if isinstance(inner, KernelCall)}
        moved = _moved(first.setdefault(call.name, call), call, modules)
        return {"layer": call.name, "modules": moved} if moved else {"layer": call.name}

    def entry(call: KernelCall) -> dict[str, Any]:
        return {
            "name": call.name,
            "kind": "function" if call.is_function else "kernel",
            "operators": list(call.operators),
            "lines": [lines.setdefault(line, len(lines)) for line in call.lines],
            "module": call.module,
            "bytes": expression(call.nbytes),
            "operations": expression(call.operations),
        }

    calls = entries(sequence.calls)
    layers = {name: entries(inner) for name, inner in sequence.layers.items()}
    document = {"version": _VERSION, "calls": calls, "layers": layers, "lines": list(lines)}
    path.write_text(json.dumps(document))


def read_calls(path: Path, names: Mapping[str, str], passes: Sequence[PassReport]) -> bytes | None:
    """The archive's entry; None without calls.

    names: the user's names of dimensions by torch's symbols. passes: what they changed, for ``untorch inspect``.
    """
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    for entry in [*document["calls"], *(call for inner in document["layers"].values() for call in inner)]:
        for key in ("bytes", "operations"):
            if isinstance(rpn := entry.get(key), list):
                entry[key] = [names.get(word, word) if isinstance(word, str) else word for word in rpn]
    document["passes"] = [[report.name, report.changed[:_MAX_CHANGES]] for report in passes if report.changed]
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _origins(node_schedule: Any, is_extern: bool) -> list[fx.Node]:
    """The graph's nodes behind a call, each once."""
    if is_extern:
        if node_schedule.origin_node is not None:
            return [node_schedule.origin_node]
        return sorted(node_schedule.origins, key=lambda node: node.name)
    found: dict[fx.Node, None] = {}
    for node in _scheduled(node_schedule):
        inside = [origin for origin in node.node.origins if node.is_template() or not _is_heavy(origin)]
        found.update(dict.fromkeys(sorted(inside, key=lambda origin: origin.name)))
    return list(found)


def _is_heavy(node: fx.Node) -> bool:
    """Whether a loop only prepares for the operator, which is called by itself."""
    from torch.utils.flop_counter import flop_registry

    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        target.namespace == "untorch"
        or target.overloadpacket in flop_registry
        or "scaled_dot_product" in target._schema.name
    )


def _scheduled(node_schedule: Any) -> list[Any]:
    nodes: dict[str, Any] = {}
    for node in node_schedule:
        if hasattr(node, "get_nodes"):
            nodes.update((inner.get_name(), inner) for inner in node.get_nodes() if inner.node is not None)
    return list(nodes.values())


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return f"{node.target.namespace}.{node.target._schema.name.partition('::')[2]}"
    return getattr(node.target, "__name__", str(node.target))


def _module(node: fx.Node) -> str:
    """The path of the innermost module, such as "blocks.0.up"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^(?:L\['self'\]|self)\.?", "", str(stack[-1][0])) if stack else ""


def _common(modules: list[str]) -> str:
    """The one module, or what the paths of several begin with."""
    if not modules:
        return ""
    common = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _moved(first: LayerCall, call: LayerCall, modules: Iterable[str]) -> dict[str, str]:
    """Which modules a call of a layer's function is of, by those of its first call: told by the weights it gets."""
    moved: dict[str, str] = {}
    for module in sorted(modules):
        match = re.match(r"(.*?\.)?\d+(?=\.|$)", module)
        if match is None:
            continue
        path = match[0]
        start = path.replace(".", "_") + "_"
        for one, other in zip(first.operands, call.operands, strict=False):
            number = re.search(r"_(\d+)$", other.removesuffix(one[len(start) - 1 :]))
            if one.startswith(start) and other.endswith(one[len(start) - 1 :]) and number is not None:
                new = re.sub(r"\d+$", number[1], path)
                if new != path:
                    moved[path] = new
                break
    return moved


def _short(place: str) -> str:
    """A place without this machine's folders: below sys.path as a module's path, else the file's name."""
    path, colon, line = place.rpartition(":")
    roots = [root.rstrip("/") + "/" for root in sys.path if root and os.path.isabs(root)]
    inside = [path[len(root) :] for root in roots if path.startswith(root)]
    return min(inside, key=len, default=os.path.basename(path)) + colon + line


def _fused_bytes(node_schedule: Any) -> Any:
    """Bytes of the buffers that a loop reads and writes, without those that only its own nodes see."""
    from torch._inductor.virtualized import V

    nodes = _scheduled(node_schedule)
    own = {node.get_name() for node in nodes}
    inner = {
        buffer.get_name()
        for node in nodes
        for buffer in node.get_outputs()
        if buffer.users and all(user.get_name() in own for user in buffer.users)
    }
    sizes: dict[tuple[str, bool], Any] = {}
    for node in nodes:
        for dependencies, is_write in ((node.read_writes.reads, False), (node.read_writes.writes, True)):
            for dependency in dependencies:
                if dependency.name in inner or not hasattr(dependency, "index"):
                    continue
                whole = V.graph.get_numel(dependency.name)
                part = sympy.Integer(1)
                for size in dependency.ranges.values() if dependency.is_indirect() else (dependency.get_numel(),):
                    part = part * size
                size = whole if part == whole else sympy.Min(whole, part)
                key = dependency.name, is_write
                previous = sizes.get(key)
                sizes[key] = size if previous is None or previous == size else sympy.Max(previous, size)
    return sum((size * V.graph.get_dtype(name).itemsize for (name, _), size in sizes.items()), sympy.Integer(0))


def _extern_bytes(kernel: Any, origins: list[fx.Node]) -> Any:
    """Bytes of an operator's operands and results."""
    values: list[torch.Tensor] = []
    for node in origins:
        values += _tensors(node.meta.get("val"))
        for operand in node.all_input_nodes:
            values += _tensors(operand.meta.get("val"))
    return sum((_numel(value) * value.dtype.itemsize for value in values), sympy.Integer(0))


def _operations(origins: list[fx.Node]) -> Any:
    counts = [count for node in origins if (count := _operations_of(node)) is not None]
    return sum(counts, sympy.Integer(0)) if counts else None


def _nvfp4_intermediate(arguments: dict[str, Any]) -> Any:
    """I of experts in either of NVFP4's layouts."""
    w13 = arguments["w13"]
    return w13.shape[1] // 2 if w13.dtype == torch.uint8 else w13.shape[0] * 8 // arguments["w2_global"].shape[0]


def _operations_of(node: fx.Node) -> Any:
    """Operations of one node; None for those that say nothing, such as views."""
    from torch.utils.flop_counter import flop_registry

    target, value = node.target, node.meta.get("val")
    results = _tensors(value)
    if not isinstance(target, torch._ops.OpOverload) or not results:
        return None
    name = target._schema.name.partition("::")[2]
    arguments = _bound(node)
    if target.namespace == "untorch":
        if name in _MOE:
            width = arguments["intermediate"] if name == "int4_moe" else _nvfp4_intermediate(arguments)
            inputs = _expression(arguments["hidden_states"].shape[-1])
            return 6 * _numel(arguments["topk_ids"]) * inputs * _expression(width)
        x = arguments.get("x")
        if not isinstance(x, torch.Tensor):
            return None
        if name == "decoder_linears":
            weights = [arguments[f"{layer}_weight"] for layer in ("o", "gate_up", "down", "next")]
            values = sum(w.numel() * (8 if w.dtype == torch.int32 else 1) for w in weights if w is not None)
            return 2 * _expression(x.shape[0]) * values
        if name in _LINEAR:
            return 2 * _numel(results[0]) * _expression(x.shape[-1])
        if name == "fused_convolution":  # each output or, transposed, each input meets a weight of its group once
            weight = arguments["weight"]
            weights = _numel(weight) // _expression(weight.shape[0 if weight.dim() == x.dim() else -1])
            whole = x if arguments["transposed"] else results[0]
            return 2 * _numel(whole) * weights
        if name in _CONVOLUTION:
            taps = sympy.Integer(1)
            for size in arguments["kernel"]:
                taps = taps * _expression(size)
            return 2 * _numel(results[0]) * taps * (_expression(x.shape[1]) // _expression(arguments["groups"]))
        return None
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # the registry has it for GPUs
        query, key, attended = arguments["query"], arguments["key"], arguments["value"]
        scores = _numel(query) // _expression(query.shape[-1]) * _expression(key.shape[-2])
        return 2 * scores * (_expression(query.shape[-1]) + _expression(attended.shape[-1]))
    if (count := flop_registry.get(target.overloadpacket)) is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda inner: inner.meta.get("val"))
        return _expression(count(*args, **kwargs, out_val=value))
    if torch.Tag.pointwise in target.tags:
        return sum((_numel(result) for result in results), sympy.Integer(0))
    if torch.Tag.reduction in target.tags:
        operands = [operand for inner in node.all_input_nodes for operand in _tensors(inner.meta.get("val"))]
        return _numel(operands[0]) if operands else None
    return None


def _bound(node: fx.Node) -> dict[str, Any]:
    """An operator's arguments by name, tensors as their fake values."""
    assert isinstance(node.target, torch._ops.OpOverload)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda inner: inner.meta.get("val"))
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []


def _numel(value: torch.Tensor) -> Any:
    return _expression(value.numel())


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
