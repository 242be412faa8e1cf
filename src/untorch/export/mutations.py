"""Which values of a graph may share memory, and which attributes and inputs it writes into."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["WRITTEN_ELSEWHERE", "Aliases", "Mutations", "find_mutations", "is_mutating"]

_aten = torch.ops.aten
# They write into arguments 3 and 4, the running statistics, when argument 5 is true; their schemas do not say so.
_NORMS = {_aten.batch_norm.default, _aten.instance_norm.default, _aten.cudnn_batch_norm.default}


@dataclass(frozen=True)
class Mutations:
    """``attributes``: get_attr targets that are written; ``inputs``: names of placeholders that are written."""

    attributes: frozenset[str]
    inputs: frozenset[str]


# In a module's meta: names of attributes that are written by another method of the file, which shares them.
WRITTEN_ELSEWHERE = "untorch_written_elsewhere"


class Aliases:
    """Groups the nodes of a graph that may share memory, and knows which groups are written.

    Two nodes are in one group if a schema says that one may be a view of the other, if their example values lie in one
    storage, or if an operator with parts of its own (a condition, a loop) that writes takes both. A node with several
    outputs is in one group with all of them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}
        self._written: set[fx.Node] = set()
        storages: dict[int, fx.Node] = {}
        elsewhere = getattr(graph.owning_module, "meta", {}).get(WRITTEN_ELSEWHERE, frozenset())
        for node in graph.nodes:
            self._parent[node], self._members[node] = node, [node]
            if node.op == "get_attr" and node.target in elsewhere:
                self._written.add(node)
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    self.join(node, storages.setdefault(value.untyped_storage()._cdata, node))
            if node.op == "call_function":
                self._add_call(node)

    def join(self, first: fx.Node, second: fx.Node) -> None:
        """From now on both, and what shares memory with them, are one group."""
        first, second = self._root(first), self._root(second)
        if first is second:
            return
        self._parent[second] = first
        self._members[first] += self._members.pop(second)
        if second in self._written:
            self._written.add(first)

    def group(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may share memory with ``node``, and itself."""
        return self._members[self._root(node)]

    def is_written(self, node: fx.Node) -> bool:
        """Whether anything in the graph may write into the node's memory."""
        return self._root(node) in self._written

    def _root(self, node: fx.Node) -> fx.Node:
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def _add_call(self, node: fx.Node) -> None:
        if isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            gives_views = any(result.alias_info is not None for result in schema.returns)
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is None:
                    continue
                value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                sources = _nodes_in(value)
                if argument.alias_info.is_write:
                    self._written.update(self._root(source) for source in sources)
                if gives_views:
                    self._add_sources(node, sources, argument.alias_info.is_write)
            self._add_sources(node, _statistics(node), True)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            if _writes(node):
                self._add_sources(node, node.all_input_nodes, True)
        elif node.target is operator.getitem:
            self._add_sources(node, _nodes_in(node.args[0]), False)

    def _add_sources(self, node: fx.Node, sources: Iterable[fx.Node], written: bool) -> None:
        for source in sources:
            if source.op == "get_attr" and _subgraph(source) is not None:
                continue
            self.join(source, node)
            if written:
                self._written.add(self._root(node))


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    if node.target in _NORMS:
        return bool(_statistics(node))
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def find_mutations(graph: fx.Graph) -> Mutations:
    """Follows every write back to the attributes and the placeholders whose memory it may change."""
    aliases = Aliases(graph)
    written = [node for node in graph.nodes if node.op in ("get_attr", "placeholder") and aliases.is_written(node)]
    return Mutations(
        frozenset(str(node.target) for node in written if node.op == "get_attr"),
        frozenset(node.name for node in written if node.op == "placeholder"),
    )


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a normalisation in training mode writes."""
    if node.target not in _NORMS:
        return []
    training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", node.kwargs.get("use_input_stats"))
    return _nodes_in(node.args[3:5]) if training is not False else []


def _nodes_in(value: object) -> list[fx.Node]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, fx.Node)]


def _subgraph(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a get_attr node gives to a condition or a loop, if it is one."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    try:
        value = operator.attrgetter(str(node.target))(owner)
    except AttributeError:
        return None
    return value if isinstance(value, fx.GraphModule) else None


def _writes(node: fx.Node) -> bool:
    """Whether a call of a higher-order operator may write: its graphs do, or it has none that could be read."""
    graphs = [graph for source in node.all_input_nodes if (graph := _subgraph(source)) is not None]
    return not graphs or any(
        is_mutating(inner) or (isinstance(inner.target, torch._ops.HigherOrderOperator) and _writes(inner))
        for graph in graphs
        for inner in graph.graph.nodes
    )
