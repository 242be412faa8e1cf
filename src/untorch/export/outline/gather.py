"""Moves to the graph's inputs what belongs to no layer: constants, sizes and parts of constants."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from untorch.export.outline.nodes import is_number

__all__ = ["find_gathered", "gather"]

_INPUTS = ("placeholder", "get_attr")


def _first_computed(graph: fx.Graph) -> fx.Node:
    """The first node after the inputs."""
    node: fx.Node = next(node for node in graph.nodes if node.op not in _INPUTS)
    return node


def gather(graph: fx.Graph) -> None:
    """Reorders the nodes, in place."""
    _gather_constants(graph)
    _gather_numbers(graph)
    _gather_parts_of_constants(graph)


def find_gathered(graph: fx.Graph) -> set[fx.Node]:
    """What was gathered at the top: nodes that are made of inputs, constants and each other before any other node."""
    outside: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in _INPUTS:
            continue
        if node.op != "call_function" or not (is_number(node) or node.target == torch.ops.aten.select.int):
            break
        outside.add(node)
    return outside


def _gather_constants(graph: fx.Graph) -> None:
    first, late = _first_computed(graph), False
    for node in list(graph.nodes):
        late = late or node is first
        if late and node.op == "get_attr":
            first.prepend(node)


def _gather_numbers(graph: fx.Graph) -> None:
    """Moves sizes, and what is computed from them, to the graph's inputs: layers share them.

    A size is taken from an input that has it, in the place of a tensor that is computed.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last = _first_computed(graph).prev
    sizes: dict[Any, fx.Node] = {}  # by the symbol
    known: dict[Hashable, fx.Node] = {}  # by the expression
    at_the_top: set[fx.Node] = set()
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(value.node.expr, node)
            at_the_top.add(node)

    def size(symbol: Any) -> fx.Node | None:
        nonlocal last
        if symbol in sizes:
            return sizes[symbol]
        for node in inputs:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            for dimension, extent in enumerate(value.shape):
                if isinstance(extent, torch.SymInt) and extent.node.expr == symbol:
                    with graph.inserting_after(last):
                        made = graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
                    made.meta["val"] = extent
                    sizes[symbol], last = made, made
                    at_the_top.add(made)
                    return made
        return None

    for node in list(graph.nodes):
        if node.op != "call_function" or not is_number(node) or node in at_the_top:
            continue
        value = node.meta["val"]
        expression = value.node.expr if isinstance(value, torch.SymInt) else None
        if expression is None or free_unbacked_symbols(value):
            continue
        if (same := known.get(expression)) is not None:
            node.replace_all_uses_with(same)
        elif getattr(expression, "is_Symbol", False) and (leaf := size(expression)) is not None:
            node.replace_all_uses_with(leaf)
            known[expression] = leaf
        elif all(argument in at_the_top for argument in node.all_input_nodes):
            if node.all_input_nodes:
                last.append(node)
                last = node
                at_the_top.add(node)
                known[expression] = node
            continue
        else:
            continue
        graph.erase_node(node)


def _gather_parts_of_constants(graph: fx.Graph) -> None:
    """Moves the parts of constants (``offsets[3, 1]``) to the graph's inputs: each layer has another one."""
    constants = {node for node in graph.nodes if node.op == "get_attr"}
    last = _first_computed(graph).prev
    for node in list(graph.nodes):
        if node.target != torch.ops.aten.select.int or node.all_input_nodes[0] not in constants:
            continue
        if not all(isinstance(argument, int) for argument in node.args[1:]):
            continue
        last.append(node)
        constants.add(node)
        last = node
