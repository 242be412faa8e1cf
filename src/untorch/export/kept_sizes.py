"""Sizes that are dynamic stay so. Where code asks whether one has the example's value, torch takes it to be fixed, and
what is compiled is wrong for any other, without a word."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

__all__ = ["FixedSizeError", "keeps_sizes"]


class FixedSizeError(Exception):
    """A size of an input was dynamic, and no longer is."""


@contextlib.contextmanager
def keeps_sizes(module: fx.GraphModule) -> Iterator[None]:
    """Raises FixedSizeError behind the block if sizes of the module's inputs that were dynamic before it no longer are.

    The caller puts the name of what fixed them before its message.
    """
    dynamic = [
        (node.target, position, size)
        for node in module.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        for position, size in enumerate(node.meta["val"].shape)
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number
    ]
    yield
    fixed = [f"dimension {at} of {name} to {size.node.expr}" for name, at, size in dynamic if size.node.expr.is_number]
    if fixed:
        raise FixedSizeError(f"fixed {', '.join(fixed)}, which are dynamic: other sizes would have wrong results")
