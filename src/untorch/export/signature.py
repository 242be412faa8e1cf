"""Describes a method's flat inputs and outputs for the manifest: names, dtypes, shapes with their symbols, strides."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from untorch.export.mutations import Mutations
from untorch.runtime.errors import UnsupportedError

__all__ = ["describe_inputs", "describe_outputs", "dtype_name", "leaf_paths", "to_rpn"]

_OPERATORS = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "Min": "min",
    "Max": "max",
}  # fmt: skip
_MAX_POWER = 8


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def describe_inputs(
    program: torch.export.ExportedProgram, model: torch.nn.Module | None, mutations: Mutations, device: str = "cpu"
) -> list[dict[str, Any]]:
    """One entry a flat input, tensors and constants, in the order of the call.

    ``device``: where most of the program's tensors lie; an entry says its own only where that is another.
    """
    args, kwargs = program.example_inputs or ((), {})
    examples, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    paths = list(leaf_paths(in_spec))
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    arguments = [s.arg for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    names = _argument_names(program, model, len(args))
    entries: list[dict[str, Any]] = []
    for i, argument in enumerate(arguments):
        name = _input_name(paths[i], names) if i < len(paths) else argument.name
        if isinstance(argument, ConstantArgument):
            entries.append({"name": name, "constant": _plain(argument.value, f"input {name}")})
            continue
        value = placeholders[argument.name].meta["val"]
        if isinstance(argument, SymIntArgument) and device == "cpu":
            entries.append(_describe_number(name, value, program.range_constraints))
            continue
        if not isinstance(argument, TensorArgument):
            kind = "a number" if isinstance(argument, SymIntArgument) else f"a {type(argument).__name__}"
            raise UnsupportedError(
                f"input {name}: {kind} that may change is not supported on {device}: pass it as a 0-D tensor, or "
                f"export it as a constant (without a dynamic_shapes entry)"
            )
        entry = _describe_tensor(name, value, program.range_constraints, device)
        strides = [s if isinstance(s, int) else _static(s) for s in value.stride()]
        example = examples[i] if i < len(examples) else None
        entry["contiguous"] = bool(example.is_contiguous()) if isinstance(example, torch.Tensor) else True
        entry["strides"] = strides
        if argument.name in mutations.inputs:
            entry["mutated"] = True
        entries.append(entry)
    return entries


def describe_outputs(program: torch.export.ExportedProgram, device: str = "cpu") -> list[dict[str, Any] | None]:
    """One entry a flat output, None for outputs that are None. ``device`` as for describe_inputs."""
    specs = [s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    out_spec = program.call_spec.out_spec
    paths = dict(enumerate(leaf_paths(out_spec))) if out_spec is not None else {}
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    entries: list[dict[str, Any] | None] = []
    for i, spec in enumerate(specs):
        name = _output_name(paths.get(i, ()), i)
        argument = spec.arg
        if isinstance(argument, TensorArgument):
            entries.append(_describe_tensor(name, values[argument.name], program.range_constraints, device))
        elif isinstance(argument, ConstantArgument) and argument.value is None:
            entries.append(None)
        elif isinstance(argument, SymIntArgument):
            entries.append({"name": name, "dtype": "int64", "shape": [], "scalar": True})
        elif isinstance(argument, SymFloatArgument):
            entries.append({"name": name, "dtype": "float64", "shape": [], "scalar": True})
        elif isinstance(argument, SymBoolArgument):
            entries.append({"name": name, "dtype": "bool", "shape": [], "scalar": True})
        elif isinstance(argument, ConstantArgument):
            entries.append({"name": name, "constant": _plain(argument.value, f"output {name}")})
        else:
            raise UnsupportedError(f"output {name}: a {type(argument).__name__} cannot be returned: return a tensor")
    return entries


def leaf_paths(spec: pytree.TreeSpec, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each leaf. Unlike torch's function it needs nothing from classes that others registered."""
    if spec.is_leaf():
        yield path
        return
    children = spec.children()
    for key, child in zip(_child_keys(spec, len(children)), children, strict=True):
        yield from leaf_paths(child, (*path, key))


def _child_keys(spec: pytree.TreeSpec, count: int) -> list[Any]:
    kind, names = spec.type, spec.context
    if kind is defaultdict:
        names = names[1]
    elif isinstance(names, type) and hasattr(names, "_fields"):  # a namedtuple
        return [pytree.GetAttrKey(name) for name in names._fields]
    elif kind is not None and kind.__module__ == "torch.return_types":
        return [pytree.GetAttrKey(name) for name in kind.__match_args__]
    elif isinstance(names, list) and len(names) == 2 and all(isinstance(part, list | tuple) for part in names):
        names = names[0]  # a dataclass: the fields that have values, and those that are None
    if kind not in (tuple, list) and isinstance(names, list | tuple) and len(names) == count:
        return [pytree.MappingKey(name) for name in names]
    return [pytree.SequenceKey(i) for i in range(count)]


def to_rpn(expression: sympy.Expr) -> list[int | str] | None:
    """A size expression in reverse Polish notation: ints, symbol names and operators; None when it has others.

    The operators are those that the loader knows: + - * // % min max.
    """
    if isinstance(expression, sympy.Integer | int):
        return [int(expression)]
    if isinstance(expression, sympy.Symbol):
        return [expression.name]
    kind = type(expression).__name__
    arguments = list(expression.args)
    if kind in ("Pow", "PowByNatural"):
        base, exponent = arguments
        if not exponent.is_Integer or not 1 <= exponent <= _MAX_POWER:
            return None
        kind, arguments = "Mul", [base] * int(exponent)
    parts = [to_rpn(argument) for argument in arguments]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    if kind == "CeilDiv":
        over, by = known
        return [*over, *by, "+", 1, "-", *by, "//"]
    if kind not in _OPERATORS:
        return None
    result = list(known[0])
    for part in known[1:]:
        result += [*part, _OPERATORS[kind]]
    return result


def _describe_tensor(name: str, value: torch.Tensor, ranges: dict[Any, Any], device: str) -> dict[str, Any]:
    if value.layout != torch.strided:
        raise UnsupportedError(
            f"{name}: expected a strided tensor, got the layout {value.layout}: pass {name}.to_dense(), or its indices "
            f"and values as tensors of their own (index_add, scatter_add), and make no sparse tensor of them"
        )
    entry = {"name": name, "dtype": dtype_name(value.dtype), "shape": [_dimension(s, ranges) for s in value.shape]}
    if value.device.type != device:
        entry["device"] = value.device.type
    return entry


def _describe_number(name: str, value: Any, ranges: dict[Any, Any]) -> dict[str, Any]:
    return {
        "name": name, "dtype": "int64", "shape": [], "scalar": True, "contiguous": True, "strides": [],
        "value": _dimension(value, ranges),
    }  # fmt: skip


def _static(value: Any) -> int | None:
    expression = value.node.expr
    return int(expression) if expression.is_Integer else None


def _dimension(size: Any, ranges: dict[Any, Any]) -> int | dict[str, Any]:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        bounds = ranges.get(expression)
        return {
            "symbol": expression.name,
            "min": _bound(bounds.lower) if bounds is not None else 0,
            "max": _bound(bounds.upper) if bounds is not None else None,
        }
    return {"expr": str(expression), "rpn": to_rpn(expression)}


def _bound(value: Any) -> int | None:
    return int(value) if getattr(value, "is_Integer", isinstance(value, int)) else None


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
    raise UnsupportedError(f"{name}: a constant {what} cannot be recorded: use a tensor")


def _argument_names(program: torch.export.ExportedProgram, model: torch.nn.Module | None, count: int) -> list[str]:
    for entry in program.module_call_graph:
        names = getattr(entry.signature, "forward_arg_names", None) if entry.fqn == "" and entry.signature else None
        if names and len(names) >= count:
            return list(names)
    if model is not None:
        parameters = inspect.signature(model.forward).parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) >= count:
            return positional
    return [f"args[{i}]" for i in range(count)]


def _input_name(path: Any, names: list[str]) -> str:
    side, first, *rest = path
    name = names[first.idx] if side.idx == 0 else str(first.key)
    return name + pytree.keystr(tuple(rest))


def _output_name(path: Any, index: int) -> str:
    if not path:
        return "output"
    first, *rest = path
    key = getattr(first, "key", getattr(first, "name", None))
    head = str(key) if key is not None else f"output_{getattr(first, 'idx', index)}"
    return head + pytree.keystr(tuple(rest))
