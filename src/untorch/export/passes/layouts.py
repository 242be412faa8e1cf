"""Puts a node in the place of another one, with its strides where an operator behind it depends on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.passes.calls import add_call
from untorch.export.passes.constants import is_alias

__all__ = ["replace_in_layout"]

_aten = torch.ops.aten


def replace_in_layout(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    """Replaces ``node`` by ``result`` of the same shape, copied if strides matter and differ, and erases it."""
    if _is_viewed(node):
        with graph.inserting_before(node):
            result = _laid_out_like(graph, node, result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_viewed(node: fx.Node) -> bool:
    """Whether an operator follows that the strides decide about: it works with some, and fails with others."""
    waiting, seen = list(node.users), set()
    while waiting:
        user = waiting.pop()
        if user in seen or not is_alias(user):
            continue
        seen.add(user)
        if user.target in (_aten.view.default, _aten.as_strided.default, _aten.view.dtype):
            return True
        waiting += user.users
    return False


def _laid_out_like(graph: fx.Graph, node: fx.Node, result: fx.Node) -> fx.Node:
    """The result with the strides of ``node``: itself, or a copy, contiguous as it is or with heads behind queries."""
    if _has_strides(result, node):
        return result
    kept = {"memory_format": torch.contiguous_format}
    copied = add_call(graph, node, _aten.clone.default, (result,), kept)
    if _has_strides(copied, node):
        return copied
    graph.erase_node(copied)
    turned = add_call(graph, node, _aten.transpose.int, (result, -3, -2))
    copied = add_call(graph, node, _aten.clone.default, (turned,), kept)
    copied = add_call(graph, node, _aten.transpose.int, (copied, -3, -2))
    if not _has_strides(copied, node):
        raise ValueError(f"{node.name} has strides that are unknown here: {_value(node).stride()}")
    return copied


def _has_strides(node: fx.Node, like: fx.Node) -> bool:
    value, expected = _value(node), _value(like)
    pairs = zip(value.shape, value.stride(), expected.stride(), strict=True)
    return all(_same(size, 1) or _same(a, b) for size, a, b in pairs)


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta.get("val")
    assert isinstance(value, torch.Tensor)
    return value


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)
