"""Which nodes of a graph compute the same of the same: layers repeat views and tables."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from untorch.export.mutations import Aliases
from untorch.export.passes.constants import is_pure

__all__ = ["equal_nodes"]


def equal_nodes(graph: fx.Graph, aliases: Aliases) -> dict[fx.Node, fx.Node]:
    """For each node the first one with its value. What is written, or has effects, is equal to itself alone."""
    equal: dict[fx.Node, fx.Node] = {}
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        equal[node] = node
        if node.op == "get_attr" and not aliases.is_written(node):
            equal[node] = known.setdefault(("get_attr", node.target), node)
        elif node.op == "call_function" and is_pure(node) and not aliases.is_written(node):
            args = pytree.tree_map(lambda x: equal[x] if isinstance(x, fx.Node) else x, (node.args, node.kwargs))
            leaves, spec = pytree.tree_flatten(args)
            try:  # True and 1 are equal, but not the same
                key = (node.target, tuple((type(leaf), leaf) for leaf in leaves), str(spec))
                equal[node] = known.setdefault(key, node)
            except TypeError:  # no hash
                continue
    return equal
