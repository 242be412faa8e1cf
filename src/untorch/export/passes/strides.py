"""What other strides of a value do to the nodes behind it: which of them change, or why it cannot have them."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from untorch.export.passes.calls import example_result

__all__ = ["propagate"]


def propagate(source: fx.Node, values: dict[fx.Node, Any], positions: Mapping[fx.Node, int]) -> str | None:
    """Adds the values of nodes behind ``source`` that get other strides; why that cannot be, if it cannot.

    values: the example values of nodes that differ from their metadata; the source's among them.
    positions: of the nodes in the graph.
    """
    waiting = [(positions[user], user) for user in source.users]
    heapq.heapify(waiting)
    seen: set[fx.Node] = set()
    while waiting:
        _, node = heapq.heappop(waiting)
        if node in seen:
            continue
        seen.add(node)
        if node.op == "output":
            return "it is a result of the model, whose strides would change"
        target: Any = node.target
        if node.op != "call_function" or not (
            target is operator.getitem or isinstance(target, torch._ops.OpOverload)
        ):  # fmt: skip
            return f"{node.name} reads its result by what cannot be looked into"
        given: Any = fx.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta.get("val")))
        args, kwargs = given
        try:
            value = example_result(target, args, kwargs)
        except Exception:
            return f"{node.name} needs its result contiguous, which would be a copy"
        if _same_strides(value, node.meta.get("val")):
            continue
        values[node] = value
        for user in node.users:
            heapq.heappush(waiting, (positions[user], user))
    return None


def _same_strides(value: Any, before: Any) -> bool:
    pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(before), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    return all(statically_known_true(p == q) for a, b in tensors for p, q in zip(a.stride(), b.stride(), strict=True))
