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
# They take sizes, dtype and device from a tensor, and none of its elements; the value that they fill in.
_FILLED: dict[object, int] = {
    torch.ops.aten.new_zeros.default: 0, torch.ops.aten.zeros_like.default: 0,
    torch.ops.aten.new_ones.default: 1, torch.ops.aten.ones_like.default: 1,
}  # fmt: skip
_FILLED_WITH: dict[object, int] = {
    torch.ops.aten.new_full.default: 2,
    torch.ops.aten.full_like.default: 1,
}  # the argument's position
_RESIZES = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default, torch.ops.aten.set_.source_Tensor}


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

    Operators of aten and prims count, and those of PT2E that quantise and dequantise, if they are pure, and if their
    results have fixed sizes. A tensor that the graph
    makes and then writes (``mask = x.new_zeros(6, 6); mask[:3] = 1``) counts with its last value, if everything that
    is written is known, and if nothing else reads it before the last write.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._values: dict[fx.Node, Any] = {}
        self._known: dict[fx.Node, bool] = {}
        self._written: dict[fx.Node, list[fx.Node]] = {}
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
            elif not aliases.is_written(node):
                self._known[node] = self._is_computable(node)
            elif is_mutating(node):
                self._add_written(node, aliases)

    def is_known(self, node: fx.Node) -> bool:
        """Whether the node's value is known at export. Nodes that were added later are not."""
        return self._known.get(node, False)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values a known node depends on."""
        return [] if _is_filled(node) else node.all_input_nodes

    def written(self, node: fx.Node) -> list[fx.Node]:
        """The tensor that the graph makes and writes, with its views and the writes, in graph order; else nothing."""
        return self._written.get(node, [])

    def from_module(self, node: fx.Node) -> bool:
        """Whether a known node's value depends on a tensor of the module, and is not only made from numbers."""
        seen, todo = set(), [node]
        while todo:
            node = todo.pop()
            if node.op == "get_attr":
                return True
            if node not in seen:
                seen.add(node)
                todo += self._needed(node)
        return False

    def value(self, node: fx.Node) -> Any:
        """The value of a known node, computed by eager PyTorch where its inputs lie."""
        todo = [node]
        while todo:
            last = todo[-1]
            if needed := [source for source in self._needed(last) if source not in self._values]:
                todo += needed
                continue
            todo.pop()
            for member in self.written(last) or [last]:
                if member not in self._values:
                    self._values[member] = self._compute(member)
        return self._values[node]

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """What has to be known before a node; of what is written, before all of it."""
        group = self.written(node)
        if not group:
            return self.sources(node)
        return [source for member in group for source in self.sources(member) if source not in group]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return attribute(self._module, str(node.target)).detach()
        if _is_filled(node):
            like = node.meta["val"]
            at = _FILLED_WITH.get(node.target)
            value: Any = _FILLED[node.target] if at is None else node.args[at]
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            return made.fill_(value)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._values[source])
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _add_written(self, node: fx.Node, aliases: Aliases) -> None:
        """Decides at the last write about a tensor that the graph makes: its views and its writes are known, or not.

        The nodes that may share its memory are one that makes the tensor, and others that take one of them.
        """
        members = set(aliases.group(node))
        group = [other for other in node.graph.nodes if other in members]
        last = max(i for i, member in enumerate(group) if is_mutating(member))
        if group[last] is not node or any(members.isdisjoint(member.all_input_nodes) for member in group[1:]):
            return
        if any(user not in members and user < node for member in group for user in member.users):
            return
        self._known.update(dict.fromkeys(group, True))
        if all(self._is_write(member) if is_mutating(member) else self._is_computable(member) for member in group):
            self._written.update(dict.fromkeys(group, group))
        else:
            self._known.update(dict.fromkeys(group, False))

    def _is_write(self, node: fx.Node) -> bool:
        """Whether a write can be done at export: an operator of aten with known operands, and no random one."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            return False
        if torch.Tag.nondeterministic_seeded in node.target.tags or node.target in _RESIZES:
            return False
        return _is_static(node) and all(self._known.get(source, False) for source in node.all_input_nodes)

    def _is_plain(self, node: fx.Node) -> bool:
        value = attribute(self._module, str(node.target))
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided

    def _is_computable(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not is_pure(node):
            return False
        if not all(self._known.get(source, False) for source in self.sources(node)):
            return False
        if node.target is operator.getitem:
            return _is_static(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        name = node.target._schema.name.split("::")[-1]
        if node.target.namespace == "quantized_decomposed":
            return name.startswith(("quantize_per_", "dequantize_per_")) and _is_static(node)
        if node.target.namespace not in ("aten", "prims"):
            return False
        return name not in _UNDEFINED and _is_static(node)


def _is_filled(node: fx.Node) -> bool:
    """Whether the node fills a tensor with one number, and takes sizes and dtype from another."""
    if node.target in _FILLED:
        return True
    at = _FILLED_WITH.get(node.target)
    return at is not None and len(node.args) > at and isinstance(node.args[at], bool | int | float)


def _is_static(node: fx.Node) -> bool:
    """The node gives tensors only, and their sizes are numbers."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return bool(values) and all(
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        for value in values
    )
