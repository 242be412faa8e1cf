"""Which attributes and inputs a graph writes into, seen through views."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

__all__ = ["Mutations", "find_mutations", "is_mutating"]


@dataclass(frozen=True)
class Mutations:
    """``attributes``: get_attr targets that are written; ``inputs``: names of placeholders that are written."""

    attributes: frozenset[str]
    inputs: frozenset[str]


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def find_mutations(graph: fx.Graph) -> Mutations:
    """Follows every write back to the attribute or the placeholder whose memory it changes."""
    roots: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            roots[node] = node
        elif node.op == "call_function":
            if isinstance(node.target, torch._ops.OpOverload):
                arguments = node.target._schema.arguments
                for i, argument in enumerate(arguments):
                    value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                    values = value if isinstance(value, list | tuple) else (value,)
                    for source in values:
                        if argument.alias_info is None or not isinstance(source, fx.Node) or source not in roots:
                            continue
                        roots.setdefault(node, roots[source])
                        if argument.alias_info.is_write:
                            written.add(roots[source])
            else:
                source = node.args[0] if node.args else None
                if isinstance(source, fx.Node) and source in roots:
                    roots[node] = roots[source]
    return Mutations(
        frozenset(str(node.target) for node in written if node.op == "get_attr"),
        frozenset(node.name for node in written if node.op == "placeholder"),
    )
