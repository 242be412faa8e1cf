"""Evaluating parts of a graph with random values, to learn what they compute whatever their nodes look like."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["SHAPE_ONLY", "evaluate", "operator_name", "outline", "probe_size", "small_numbers"]

_FEW = 6  # of a size that varies: thousands of tokens tell no more
# They keep the order of the elements.
SHAPE_ONLY = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "alias"}


def operator_name(node: fx.Node) -> str:
    """An operator of aten without namespace and overload: "mul"; others as they are printed."""
    if node.target is operator.getitem:
        return "unbind"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return str(node.target)
    return node.target._schema.name.removeprefix("aten::")


def probe_size(size: Any) -> int:
    """A size of random values: that of the example inputs, but small where it varies."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression, known = size.node.expr, size.node.shape_env.backed_var_to_val
    if not expression.free_symbols <= known.keys():
        return int(size.node.hint)
    found = expression.xreplace({symbol: min(known[symbol], sympy.Integer(_FEW)) for symbol in expression.free_symbols})
    return int(found) if found.is_Integer else int(size.node.hint)


def evaluate(nodes: Iterable[fx.Node], values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The values of ``nodes``, which are in the graph's order, and those that are given."""
    known = dict(values)
    for node in nodes:
        given: Any = fx.map_arg((node.args, node.kwargs), lambda n: known[n] if n in known else n.meta["val"])
        args, kwargs = pytree.tree_map(lambda x: probe_size(x) if isinstance(x, torch.SymInt) else x, given)
        target: Any = node.target
        with torch.no_grad():
            known[node] = target(*args, **kwargs)
    return known


def outline(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> str:
    """What ``nodes``, in the graph's order, compute of ``inputs``, without names: repeated layers have one outline."""
    places: dict[fx.Node, str] = {}
    lines = []

    def place(node: fx.Node) -> str:
        value = node.meta["val"]
        return places.get(node) or (str(value) if isinstance(value, int | torch.SymInt) else node.name)

    for node in inputs:
        value = node.meta["val"]
        places[node] = f"%{len(places)}"
        lines.append(f"{value.dtype} {tuple(value.shape)} {value.device}")
    for node in nodes:
        given: Any = (node.args, node.kwargs)
        lines.append(f"{node.target} {fx.map_arg(given, place)}")
        places[node] = f"%{len(places)}"
    return "\n".join(lines)


def small_numbers(nodes: Iterable[fx.Node]) -> list[float]:
    """The numbers between 0 and 1 that something is added to, or that a norm has: what eps may be."""
    numbers = [
        argument
        for node in nodes
        if operator_name(node) in ("add", "rms_norm")
        for argument in (*node.args, *node.kwargs.values())
        if isinstance(argument, float) and 0 < argument < 1
    ]
    return list(dict.fromkeys(numbers)) or [torch.finfo(torch.float32).eps]
