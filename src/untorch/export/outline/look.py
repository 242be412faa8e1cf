"""What a node looks like: its operator, its constants, and what its operands and results are.

Nodes of equal layers look equal; which nodes their operands are is told apart by who compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import Argument

__all__ = ["form", "kind", "look", "own_numbers"]


def look(node: fx.Node) -> Hashable:
    """The operator, its constants, and the kinds of its operands and of its results."""
    return _target(node), form(node, kind), kind(node)


def form(node: fx.Node, describe: Callable[[fx.Node], Hashable]) -> Hashable:
    """The arguments, with what ``describe`` says of each operand, and without the numbers that may differ."""
    return _hashable(_without_indices(node, _described(node, describe)))


_MARK = ("number",)


def own_numbers(node: fx.Node) -> list[int]:
    """Places of integers that may differ between layers: those that operators of libraries take at run time.

    An offset in a pool is one. Inductor makes code of PyTorch's own operators, which is better with constants.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace in ("aten", "prims"):
        return []
    declared = node.target._schema.arguments
    return [
        index
        for index, (value, argument) in enumerate(zip(node.args, declared, strict=False))
        if type(value) is int and argument.real_type.kind() == "SymIntType"
    ]


def _marked(node: fx.Node) -> tuple[Any, ...]:
    arguments = list(node.args)
    for index in own_numbers(node):
        arguments[index] = _MARK
    return tuple(arguments)


@dataclass(frozen=True)
class _Operand:
    """Stands for an operand."""

    described: Hashable


def _described(node: fx.Node, describe: Callable[[fx.Node], Hashable]) -> Any:
    return fx.map_arg((_marked(node), node.kwargs), lambda operand: cast(Argument, _Operand(describe(operand))))


def _target(node: fx.Node) -> Hashable:
    return node.target if not isinstance(node.target, str) else ("name", node.target)


def kind(node: fx.Node) -> Hashable:
    """Dtype, sizes, strides and device; for numbers the expression."""
    return _kind_of(node.meta.get("val"))


def _kind_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        # By the expressions: the symbols of one graph have one meaning.
        sizes, strides = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
        return value.dtype, sizes, strides, str(value.device)
    if isinstance(value, tuple | list):
        return tuple(map(_kind_of, value))
    return type(value).__name__, str(value)


def _without_indices(node: fx.Node, arguments: Any) -> Any:
    """A Triton kernel by itself instead of its place in a table, which each call has of its own."""
    if node.target is not torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return arguments
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    positional, by_name = arguments
    by_name = dict(by_name)
    kernel = kernel_side_table.get_kernel(by_name.pop("kernel_idx"))
    constants = kernel_side_table.get_constant_args(by_name.pop("constant_args_idx"))
    return positional, by_name, _kernel(kernel), constants


def _kernel(kernel: Any) -> Hashable:
    """Each call has an autotuner of its own: they are equal if they try the same configurations of one function."""
    configs = getattr(kernel, "configs", None)
    if configs is None or any(config.pre_hook is not None for config in configs):
        return id(kernel)
    return id(kernel.fn), tuple(str(config) for config in configs)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple(sorted(((str(key), _hashable(entry)) for key, entry in value.items()), key=lambda item: item[0]))
    if isinstance(value, slice):
        return ("slice", _hashable((value.start, value.stop, value.step)))
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return type(value), value
