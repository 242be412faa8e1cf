"""The mask of an attention that was written by hand: its terms, in the sizes of one another's views, become one.

Scores [b·w, h, l, s] may be viewed as [b, w, h, l, s] where a mask of windows [1, w, 1, l, s] is added. As a mask of
the scores themselves it is [w, 1, l, s] for b = 1, and is repeated for each batch entry otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.passes.calls import add_call
from untorch.export.passes.epilogues import value_of

__all__ = ["Sizes", "Term", "broadcast_as", "combine"]

_aten = torch.ops.aten
Shape = Sequence[Any]  # of numbers and SymInts


@dataclass(frozen=True)
class Term:
    """What is done to scores while they have the ``shape``.

    ``factor`` · node is added. With ``fill`` the node is Boolean, and that number is added where it is ``masked``.
    """

    node: fx.Node
    shape: Shape
    factor: float = 1.0
    fill: float | None = None
    masked: bool = True


class Sizes:
    """Sizes as arguments of operators: numbers, and the nodes of a graph that give sizes that vary."""

    def __init__(self, graph: fx.Graph, tensors: Sequence[fx.Node], sizes: Sequence[fx.Node]) -> None:
        self._graph, self._tensors, self._sizes = graph, tensors, sizes

    def argument(self, size: Any) -> Any:
        """A number or a node; None where no node is known to give this size."""
        if isinstance(size, int):
            return size
        for node in self._sizes:
            if _same(node.meta.get("val"), size):
                return node
        for tensor in self._tensors:
            value = value_of(tensor)
            assert value is not None
            for dim, given in enumerate(value.shape):
                if _same(given, size):
                    return add_call(self._graph, tensor, _aten.sym_size.int, (tensor, dim))
        return None


def combine(
    graph: fx.Graph, like: fx.Node, terms: Sequence[Term], shape: Shape, sizes: Sizes, dtype: torch.dtype
) -> fx.Node | None:
    """One mask for scores of this shape, as F.scaled_dot_product_attention takes it: Boolean, or what is added.

    ``dtype`` is what masked fills become that other terms are added to. The nodes are inserted where the graph inserts
    at the moment. None: a term's dimensions are not known to be those of the scores.
    """
    boolean = all(term.fill == -math.inf for term in terms)
    mask: fx.Node | None = None
    for term in terms:
        node = term.node
        if term.fill is not None:
            if term.masked == boolean:  # a Boolean mask is true where the key is seen
                node = add_call(graph, like, _aten.logical_not.default, (node,))
            if not boolean:
                zeros = add_call(graph, like, _aten.zeros_like.default, (node,), {"dtype": dtype})
                node = add_call(graph, like, _aten.masked_fill.Scalar, (zeros, node, term.fill))
        elif term.factor != 1:
            node = add_call(graph, like, _aten.mul.Tensor, (node, term.factor))
        part = broadcast_as(graph, node, term.shape, shape, sizes)
        if part is None:
            return None
        join = _aten.logical_and.default if boolean else _aten.add.Tensor
        mask = part if mask is None else add_call(graph, like, join, (mask, part))
    return mask


def broadcast_as(graph: fx.Graph, node: fx.Node, before: Shape, after: Shape, sizes: Sizes) -> fx.Node | None:
    """``node``, which broadcasts to ``before``, as one that broadcasts to ``after``, a view of the same elements.

    It has as many dimensions as ``after``. None: the dimensions of both are not known to belong together.
    """
    value = value_of(node)
    groups = _groups(before, after)
    if value is None or groups is None or value.dim() > len(before):
        return None
    shape: list[Any] = [1] * (len(before) - value.dim()) + list(value.shape)
    wide, result, first, to = list(shape), [], 0, 0
    for count, becomes in groups:
        mine, full = shape[first : first + count], before[first : first + count]
        if all(_same(size, 1) for size in mine):
            result += [1] * becomes
        else:
            wide[first : first + count] = full
            result += after[to : to + becomes]
        first, to = first + count, to + becomes
    expanded = not all(_same(a, b) for a, b in zip(wide, shape, strict=True))
    for target, wanted in ((_aten.expand.default, wide if expanded else None), (_aten.reshape.default, result)):
        current = value_of(node)
        assert current is not None
        if wanted is None or _equal(current.shape, wanted):
            continue
        arguments = [sizes.argument(size) for size in wanted]
        if None in arguments:
            return None
        node = add_call(graph, node, target, (node, arguments))
    return node


def _groups(before: Shape, after: Shape) -> list[tuple[int, int]] | None:
    """The dimensions of two views of the same elements, from left: so many of one are so many of the other."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        choices = [
            (m, n)
            for total in range(1, len(before) - i + len(after) - j + 1)
            for m in range(min(total, len(before) - i) + 1)
            if (n := total - m) <= len(after) - j
        ]
        choices.sort(key=lambda choice: (0 in choice, sum(choice)))  # a size of one alone only where nothing else is
        found = next((c for c in choices if _same(_product(before[i:][: c[0]]), _product(after[j:][: c[1]]))), None)
        if found is None:
            return None
        groups.append(found)
        i, j = i + found[0], j + found[1]
    return groups


def _product(sizes: Shape) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _equal(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
