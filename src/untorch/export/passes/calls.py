"""Calls of operators in a graph: their arguments by name, and new ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

__all__ = ["add_call", "arguments_of"]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operator's call by name, in the order of its schema, with its defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found = {}
    for i, argument in enumerate(node.target._schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def add_call(
    graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A call with the metadata of ``like``, and an example value computed from those of its arguments.

    The node is inserted where the graph inserts at the moment.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    values = fx.map_arg((args, kwargs or {}), lambda source: source.meta["val"])
    node.meta["val"] = example_result(target, *values)
    return node


def example_result(target: Any, args: Any, kwargs: Any) -> Any:
    """What the operator gives for example values.

    Before torch 2.13, operators that are made of others refuse sizes that vary, or fix them to the example's, without
    the dispatcher in Python.
    """
    with torch.no_grad(), enable_python_dispatcher():
        return target(*args, **kwargs)
