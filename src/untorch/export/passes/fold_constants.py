"""Computes at export what depends on the module's own tensors only, and stores the results instead."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.attributes import add_constant, attribute
from untorch.export.passes.constants import Constants, is_alias
from untorch.export.passes.report import PassReport

__all__ = ["fold_constants"]

# Conversions bring them along: the dtype and the device that the input had at export.
_CHECKS = {torch.ops.aten._assert_tensor_metadata.default}


def fold_constants(module: fx.GraphModule, limit: int) -> PassReport:
    """Replaces nodes whose values are known by buffers, as late in the graph as possible.

    A result is stored if it has at most ``limit`` bytes; all together may have ``limit`` bytes more than the tensors
    that are no longer read. Left alone are views of a tensor, which cost nothing and keep its memory shared; what is
    made from numbers only (arange, full), which is cheaper to compute than to read; and outputs, which each call makes
    anew. Random operators and the module's tensors that the model writes are never folded. A tensor that the graph
    makes and writes is folded with its writes, if they are known. A result keeps its dtype, strides and device.
    """
    report = PassReport("fold_constants")
    constants, aliases = Constants(module), Aliases(module.graph)
    returned = set(module.graph.output_node().all_input_nodes)
    banned: set[fx.Node] = set()
    while True:
        found = _last_known(module.graph, constants, banned)
        refused = {}
        for node in found:
            if _nbytes(node) > limit:
                refused[node] = f"its {_nbytes(node)} bytes are above the limit of {limit}"
            elif returned.intersection(aliases.group(node)):
                refused[node] = "an output would become a tensor of the module"
        if not refused and _growth(module, found) > limit:
            refused[max(found, key=_nbytes)] = f"the folded tensors together would add more than {limit} bytes"
        if not refused:
            break
        report.skipped.update({node.name: reason for node, reason in refused.items()})
        banned.update(refused)
    _settle_checks(found, constants)
    for node in found:
        value = constants.value(node)
        with module.graph.inserting_before(node):
            folded = add_constant(module, f"{node.name}_folded", value.detach().requires_grad_(False), node)
        node.replace_all_uses_with(folded)
        for write in filter(is_mutating, constants.written(node)):  # its value has them
            sources = write.all_input_nodes
            write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
            module.graph.erase_node(write)
            _erase(sources, constants)
        report.changed.append(node.name)
    _erase(found, constants)
    _erase_written(module.graph, constants)
    return report


def _last_known(graph: fx.Graph, constants: Constants, banned: set[fx.Node]) -> list[fx.Node]:
    """The computed nodes that are known and that something reads which is not, in graph order.

    ``banned`` nodes are taken as not known, and so is what depends on them.
    """
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if constants.is_known(node) and node not in banned and all(n in known for n in constants.sources(node)):
            known.add(node)
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node not in known or all(user in known or user.target in _CHECKS for user in node.users):
            continue
        node = _base(node)
        if node.op == "call_function" and isinstance(_value(node), torch.Tensor) and constants.from_module(node):
            found[node] = None
    return list(found)


def _base(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, or itself; of an operator with several results, the one that is taken."""
    while True:
        made: Any = node.args[0] if node.target is operator.getitem else node
        if not is_alias(made) or not isinstance(made.args[0], fx.Node):
            return node
        node = made.args[0]


def _settle_checks(found: list[fx.Node], constants: Constants) -> None:
    """Runs the checks of what ``found`` is computed from, now, and erases them: they would keep it alive."""
    todo, seen = list(found), set(found)
    while todo:
        node = todo.pop()
        for user in list(node.users):
            if user.target in _CHECKS and user.all_input_nodes == [node] and node.op != "get_attr":
                args, kwargs = fx.map_arg((user.args, user.kwargs), constants.value)
                user.target(*args, **kwargs)
                node.graph.erase_node(user)
        new = [source for source in constants.sources(node) if source not in seen]
        seen.update(new)
        todo += new


def _growth(module: fx.GraphModule, found: list[fx.Node]) -> int:
    """The bytes of the results less those of the module's tensors that only they read."""
    replaced = set(found)
    live: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op == "output" or (
            node not in replaced and node.target not in _CHECKS and (node in live or not node.users)
        ):
            live.update(node.all_input_nodes)
    kept: set[int] = set()
    freed: dict[int, int] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(_value(node), torch.Tensor):
            storage = attribute(module, str(node.target)).untyped_storage()
            if node in live:
                kept.add(storage._cdata)
            else:
                freed[storage._cdata] = storage.nbytes()
    return sum(map(_nbytes, found)) - sum(size for key, size in freed.items() if key not in kept)


def _erase(nodes: list[fx.Node], constants: Constants) -> None:
    """Erases the nodes, and what only they used."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node.users or node._erased or not constants.is_known(node):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        todo += sources


def _erase_written(graph: fx.Graph, constants: Constants) -> None:
    """Erases tensors that the graph makes and writes, and that nothing reads any more: the writes would keep them."""
    for node in reversed(graph.nodes):
        group = constants.written(node)
        if node._erased or not group or any(user not in group for member in group for user in member.users):
            continue
        sources = [source for member in group for source in constants.sources(member) if source not in group]
        for member in reversed(group):
            if not member._erased:
                graph.erase_node(member)
        _erase(sources, constants)


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def _nbytes(node: fx.Node) -> int:
    value = _value(node)
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(value.shape) * value.element_size()
