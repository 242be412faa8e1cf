"""Decides torch.cond at export where the predicate is a constant, so that nothing waits for it at run time.

The generated code reads a predicate on the host. One that lies on a GPU makes every call wait for the stream.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import attribute, remove_attribute, set_attribute, unused_name
from untorch.export.passes.constants import Constants
from untorch.export.passes.report import PassReport

__all__ = ["cond_predicates_to_host"]


def cond_predicates_to_host(module: fx.GraphModule) -> PassReport:
    """Replaces cond(p, a, b, x) by the nodes of a or b, where p is known: a constant is never left on a device.

    Known are a bool, a tensor of the module that nothing writes, and what is computed from such tensors alone. They are
    read here, once. Conditions inside of the branch that was taken are decided too; those in branches and loops that
    stay are not. A predicate that depends on the inputs, or on a buffer that the model writes, stays as it is.
    """
    report = PassReport("cond_predicates_to_host")
    while True:
        # Anew for each: what was inlined brings nodes whose values may be known.
        constants, aliases = Constants(module), Aliases(module.graph)
        node = next((node for node in module.graph.nodes if _is_cond(node) and _is_known(node, constants)), None)
        if node is None:
            break
        predicate = node.args[0]
        value = constants.value(predicate) if isinstance(predicate, fx.Node) else predicate
        _inline(module, node, bool(value))
        report.changed.append(f"{node.name}: {bool(value)}")
    for node in module.graph.nodes:
        if _is_cond(node):
            written = isinstance(node.args[0], fx.Node) and aliases.is_written(node.args[0])
            report.skipped[node.name] = (
                "the model writes into the predicate" if written else "the predicate is not known before the call"
            )
    return report


def _is_cond(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.cond


def _is_known(node: fx.Node, constants: Constants) -> bool:
    predicate = node.args[0]
    return constants.is_known(predicate) if isinstance(predicate, fx.Node) else isinstance(predicate, bool)


def _inline(module: fx.GraphModule, node: fx.Node, value: bool) -> None:
    branches: list[Any] = [node.args[1], node.args[2]]
    operands: Any = node.args[3] if len(node.args) > 3 else ()
    branch = attribute(module, str(branches[0 if value else 1].target))
    inner = branch.graph
    replaced: dict[fx.Node, fx.Node] = {}
    places = [item for item in inner.nodes if item.op == "placeholder"]
    for place, operand in zip(places, operands, strict=True):
        replaced[place] = operand
    with module.graph.inserting_before(node):
        for item in inner.nodes:
            if item.op in ("placeholder", "output"):
                continue
            copy = module.graph.node_copy(item, lambda source: replaced[source])
            copy.meta = dict(item.meta)
            if item.op in ("get_attr", "call_module"):
                copy.target = unused_name(module, str(item.target))
                set_attribute(module, copy.target, attribute(branch, str(item.target)))
            replaced[item] = copy
    (results,) = inner.output_node().args
    results = fx.map_arg(results, lambda source: replaced[source])
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    for source in dict.fromkeys(branches):
        target = str(source.target)
        if not source.users:
            module.graph.erase_node(source)
        if not any(item.op == "get_attr" and item.target == target for item in module.graph.nodes):
            remove_attribute(module, target)
