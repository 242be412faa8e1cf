"""Removes taps of a convolution's kernel that read padding alone: a 3 x 3 kernel on one pixel is a 1 x 1 kernel.

Images are that small behind the last strides of a network, and dilated kernels reach far. The sizes must be known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.attributes import add_dense_constant, is_named, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import CONVOLUTIONS, is_transposed, pads_unevenly, sizes_of
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport

__all__ = ["crop_kernels"]

_aten = torch.ops.aten
_OF_DIMENSIONS = {1: _aten.conv1d.default, 2: _aten.conv2d.default, 3: _aten.conv3d.default}


def crop_kernels(module: fx.GraphModule, keep: tuple[str, ...] = ()) -> PassReport:
    """Runs the pass in place.

    keep: names and patterns of weights that stay as they are.
    """
    report = PassReport("crop_kernels")
    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target in CONVOLUTIONS]
    constants = Constants(module) if found else None
    for node in found:
        arguments = arguments_of(node)
        weight, cropped = arguments["weight"], _cropped(node, arguments)
        if constants is None or cropped is None or not constants.is_known(weight):
            continue
        if weight.op == "get_attr" and any(is_named(str(weight.target), form) for form in keep):
            continue
        taps, padding = cropped
        value = constants.value(weight).detach()[(..., *(slice(*ends) for ends in taps))]
        _, stride, _, dilation = sizes_of(arguments, list(value.shape[2:]))
        with module.graph.inserting_before(node):
            stored = add_dense_constant(module, f"{weight.name}_cropped", value, weight)
            operands = (arguments["input"], stored, arguments["bias"], stride, padding, dilation, arguments["groups"])
            result = add_call(module.graph, node, _OF_DIMENSIONS[len(padding)], operands)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        report.changed.append(node.name)
    remove_unused(module)
    return report


def _cropped(node: fx.Node, arguments: dict[str, Any]) -> tuple[list[tuple[int, int]], list[int]] | None:
    """Of each dimension the first tap, the one behind the last, and the padding that is left; None if all are read."""
    x, weight, y = value_of(arguments["input"]), value_of(arguments["weight"]), value_of(node)
    if x is None or weight is None or y is None or x.dim() != weight.dim() or is_transposed(node):
        return None
    kernel = list(weight.shape[2:])
    if pads_unevenly(arguments, kernel) or not all(isinstance(size, int) for size in (*x.shape[2:], *y.shape[2:])):
        return None
    taps, left = [], []
    _, strides, paddings, dilations = sizes_of(arguments, kernel)
    sizes = zip(x.shape[2:], y.shape[2:], kernel, strides, paddings, dilations, strict=True)
    for length, outputs, size, stride, padding, dilation in sizes:
        # Tap t of output y reads pixel y · stride + t · dilation - padding.
        first = min(max(-(((outputs - 1) * stride - padding) // dilation), 0), padding // dilation)
        last = min((length - 1 + padding) // dilation + 1, size)
        rest = padding - first * dilation
        if outputs < 1 or length < 1 or last <= first:
            return None
        # The output's size follows from the same padding on both sides.
        if (length + 2 * rest - dilation * (last - first - 1) - 1) // stride + 1 != outputs:
            first, last, rest = 0, size, padding
        taps.append((first, last))
        left.append(rest)
    return None if taps == [(0, size) for size in kernel] else (taps, left)
