"""What a node of a graph that Inductor is about to lower stands for."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

__all__ = ["is_convolution", "is_heavy", "is_number", "is_view", "written_arguments"]

_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default, _aten.reshape.default, _aten.permute.default, _aten.t.default, _aten.transpose.int,
    _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.select.int,
    _aten.slice.Tensor, _aten.expand.default, _aten.as_strided.default, _aten.alias.default, _aten.detach.default,
    _aten.view.dtype, _aten.unfold.default, _aten.diagonal.default, _aten.view_as_real.default,
    _aten.view_as_complex.default, _aten.split.Tensor, _aten.split_with_sizes.default,
}  # fmt: skip
_HEAVY_NAMES = ("mm", "addmm", "bmm", "baddbmm", "convolution", "sort", "topk")


def is_number(node: fx.Node) -> bool:
    """Whether it is a size or computed from sizes, no tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def is_view(node: fx.Node) -> bool:
    """Whether its result lies in the memory of its first operand (a reshape may copy: it counts as one)."""
    return node.target in _VIEWS


def is_convolution(node: fx.Node) -> bool:
    """Whether it is one of PyTorch's, or of the library's."""
    return isinstance(node.target, torch._ops.OpOverload) and "convolution" in node.target._schema.name


def is_heavy(node: fx.Node) -> bool:
    """Whether Inductor calls a kernel of somebody else's for it: it is fused with nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not getitem
    name = target._schema.name.partition("::")
    if name[0] not in ("aten", "prims"):
        return True
    return name[2] in _HEAVY_NAMES or "attention" in name[2]


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that it writes."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
        from torch._higher_order_ops import triton_kernel_wrap

        keywords = dict(node.kwargs)
        operands: Any = keywords["kwargs"]
        values = fx.map_arg(operands, lambda operand: operand.meta["val"])
        find_written: Any = triton_kernel_wrap.get_mutated_tensors
        table = (keywords["kernel_idx"], keywords["constant_args_idx"])
        for name in find_written(*table, values, keywords["tma_descriptor_metadata"]):
            yield operands[name]
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for operand in value if isinstance(value, tuple | list) else [value]:
            if isinstance(operand, fx.Node):
                yield operand
