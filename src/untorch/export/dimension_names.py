"""Sizes that vary are called what the user called them: ``Dim("batch")`` is "batch" in messages, not torch's "s77"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from untorch.export.example_sizes import dynamic_dims
from untorch.export.method import Method

__all__ = ["dimension_names", "rename_dimensions"]

_OPERATORS = ("min", "max")  # words of size expressions


def dimension_names(method: Method) -> dict[str, str]:
    """The user's names by torch's symbols. Dimensions that torch names, and derived ones (``2 * batch``), have none."""
    if not isinstance(method.model, torch.nn.Module) or not method.dynamic_shapes or method.args is None:
        return {}
    program = method.program
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    leaves = pytree.tree_leaves((method.args, method.kwargs or {}))
    if len(leaves) != len(inputs):
        return {}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    traced = {id(leaf): values[name] for name, leaf in zip(inputs, leaves, strict=True)}
    found, _ = dynamic_dims(method.model, method.args, method.kwargs, method.dynamic_shapes)
    names: dict[str, str] = {}
    for _, tensor, dims in found:
        for index, dim in dims.items():
            value = traced.get(id(tensor))
            size = value.shape[index] if isinstance(value, torch.Tensor) else None
            if type(dim) is not Dim or not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
                continue
            symbol, name = size.node.expr.name, dim.__name__
            if name not in names.values() and name not in _OPERATORS:
                names.setdefault(symbol, name)
    symbols = {str(expression) for expression in program.range_constraints} - names.keys()
    return {symbol: name for symbol, name in names.items() if name not in symbols}


def rename_dimensions(entries: list[Any], names: Mapping[str, str]) -> None:
    """Replaces symbols in the manifest's entries of inputs or outputs, in place."""
    for entry in entries:
        for size in [*entry.get("shape", ()), entry.get("value")] if entry is not None else ():
            if not isinstance(size, dict):
                continue
            if "symbol" in size:
                size["symbol"] = names.get(size["symbol"], size["symbol"])
                continue
            size["expr"] = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), size["expr"])
            if size.get("rpn"):
                size["rpn"] = [names.get(word, word) if isinstance(word, str) else word for word in size["rpn"]]
