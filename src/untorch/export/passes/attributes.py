"""Tensors and graphs that a module's graph reads by name: looking up, adding and removing them."""

from __future__ import annotations

import operator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from untorch.export.streaming import on_disk

__all__ = [
    "add_constant", "add_dense_constant", "attribute", "is_named", "remove_attribute", "remove_unused", "set_attribute",
    "unused_name",
]  # fmt: skip


def attribute(module: fx.GraphModule, target: str) -> Any:
    """What the get_attr target names."""
    return operator.attrgetter(target)(module)


def is_named(name: str, pattern: str) -> bool:
    """Whether the pattern is for a tensor, or for the module that has it; ``name`` may begin with modules around it."""
    return any(
        fnmatchcase(each, form) for each in (name, name.rpartition(".")[0]) for form in (pattern, f"*.{pattern}")
    )


def unused_name(module: torch.nn.Module, name: str) -> str:
    """``name``, with a number behind it if the module has an attribute of that name."""
    name = name.replace(".", "_")
    found, number = name, 0
    while hasattr(module, found):
        number += 1
        found = f"{name}_{number}"
    return found


def add_constant(module: fx.GraphModule, name: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
    """Adds ``value`` as a buffer and returns a get_attr node for it, with the metadata of ``like``.

    The node is inserted where the graph inserts at the moment.
    """
    target = unused_name(module, name)
    set_attribute(module, target, value)
    node = module.graph.get_attr(target)
    node.meta = dict(like.meta)
    return node


def add_dense_constant(module: fx.GraphModule, name: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
    """add_constant of a contiguous copy, with an example value of its own shape and dtype."""
    node = add_constant(module, name, value.contiguous(), like)
    node.meta["val"] = like.meta["val"].new_empty(value.shape, dtype=value.dtype)
    return node


def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    """Gives the module a tensor or a graph; a tensor that is no parameter becomes a buffer."""
    if isinstance(value, torch.Tensor):
        value = on_disk(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def remove_attribute(module: fx.GraphModule, target: str) -> None:
    """Removes the tensor or the graph ``target`` from the module."""
    prefix, _, name = target.rpartition(".")
    delattr(module.get_submodule(prefix), name)


def remove_unused(module: fx.GraphModule) -> None:
    """Erases get_attr nodes that nothing reads, and their tensors."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    read = {node.target for node in nodes if node.users}
    for node in nodes:
        if not node.users:
            module.graph.erase_node(node)
    for target in {str(node.target) for node in nodes if node.target not in read}:
        remove_attribute(module, target)
