"""Which nodes of a graph have a value that is known at export, and that value."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.attributes import attribute

__all__ = ["Constants", "is_alias", "is_pure"]

# They give memory as it is found.
_UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


def is_pure(node: fx.Node) -> bool:
    """Whether the node only computes: it writes nothing, draws no random number, and checks nothing."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_mutating(node) or node.is_impure():
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return not (
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    )


def is_alias(node: fx.Node) -> bool:
    """Whether the node's result may lie in the memory of its first argument.

    A schema that allows a view also covers conversions; those that change the dtype or the device always copy, and so
    does ``contiguous`` of what is not.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    if not any(argument.alias_info is not None for argument in node.target._schema.arguments):
        return False
    source = node.args[0] if node.args else None
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.device != after.device:
        return False
    if node.target == torch.ops.aten.contiguous.default and isinstance(before, torch.Tensor):
        kind = node.kwargs.get("memory_format", torch.contiguous_format)
        if all(isinstance(size, int) for size in before.shape) and not before.is_contiguous(memory_format=kind):  # type: ignore[arg-type]
            return False
    if node.target.overloadpacket in (torch.ops.aten.view, torch.ops.aten.view_as_real, torch.ops.aten.view_as_complex):
        return True
    return not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype != after.dtype)


class Constants:
    """The values that depend on nothing but tensors of the module that the graph never writes.

    Operators of aten and prims count, if they are pure, and if their results have fixed sizes.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._values: dict[fx.Node, Any] = {}
        self._known: dict[fx.Node, bool] = {}
        aliases = Aliases(module.graph)
        written = {
            attribute(module, str(node.target)).untyped_storage()._cdata
            for node in module.graph.nodes
            if node.op == "get_attr" and aliases.is_written(node) and self._is_plain(node)
        }
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self._known[node] = (
                    self._is_plain(node)
                    and not aliases.is_written(node)
                    and attribute(module, str(node.target)).untyped_storage()._cdata not in written
                )
            else:
                self._known[node] = not aliases.is_written(node) and self._is_computable(node)

    def is_known(self, node: fx.Node) -> bool:
        """Whether the node's value is known at export. Nodes that were added later are not."""
        return self._known.get(node, False)

    def from_module(self, node: fx.Node) -> bool:
        """Whether a known node's value depends on a tensor of the module, and is not only made from numbers."""
        seen, todo = set(), [node]
        while todo:
            node = todo.pop()
            if node.op == "get_attr":
                return True
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return False

    def value(self, node: fx.Node) -> Any:
        """The value of a known node, computed by eager PyTorch where its inputs lie."""
        todo = [node]
        while todo:
            last = todo[-1]
            if needed := [source for source in last.all_input_nodes if source not in self._values]:
                todo += needed
                continue
            todo.pop()
            if last not in self._values:
                self._values[last] = self._compute(last)
        return self._values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return attribute(self._module, str(node.target)).detach()
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._values[source])
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _is_plain(self, node: fx.Node) -> bool:
        value = attribute(self._module, str(node.target))
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided

    def _is_computable(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not is_pure(node):
            return False
        if not all(self._known.get(source, False) for source in node.all_input_nodes):
            return False
        if node.target is operator.getitem:
            return _is_static(node)
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
            return False
        return node.target._schema.name.split("::")[-1] not in _UNDEFINED and _is_static(node)


def _is_static(node: fx.Node) -> bool:
    """The node gives tensors only, and their sizes are numbers."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return bool(values) and all(
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        for value in values
    )
