"""Stores weights of 2-D convolutions channels last, the layout that Inductor and cuDNN's tensor-core kernels take.

Without it, generated code copies each weight into that layout at every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.report import PassReport
from untorch.ops.channels_last_weight import OPERATOR

__all__ = ["channels_last_weights"]

_aten = torch.ops.aten
_CONVOLUTIONS = {
    _aten.conv2d.default, _aten.conv2d.padding, _aten.conv_transpose2d.input, _aten.convolution.default,
}  # fmt: skip


def channels_last_weights(module: fx.GraphModule) -> PassReport:
    """Stores constant weights [O, C, H, W] of convolutions as [O, H, W, C], read by ``untorch::channels_last_weight``.

    Results keep their strides: the operator's value is row-major. Not in graphs with grouped convolutions (other than
    depthwise ones), which Inductor may keep row-major, and for which row-major kernels may be faster. A kernel of 1 x 1
    is the same in both layouts.
    """
    report = PassReport("channels_last_weights")
    convolutions = [
        (node, arguments_of(node)["weight"])
        for node in module.graph.nodes
        if node.op == "call_function" and node.target in _CONVOLUTIONS
    ]
    images = [(node, weight) for node, weight in convolutions if _is_image_weight(weight)]
    if grouped := [node.name for node, weight in images if _is_grouped(node, weight)]:
        reason = f"the graph has a grouped convolution ({grouped[0]}), for which Inductor chooses the layout"
        report.skipped.update({node.name: reason for node, _ in images})
        return report
    constants = Constants(module)
    stored: dict[fx.Node, fx.Node] = {}
    for node, weight in images:
        if not constants.is_known(weight) or not constants.from_module(weight):
            report.skipped[node.name] = "the weight is computed, not a constant"
            continue
        if weight.meta["val"].is_contiguous(memory_format=torch.channels_last):
            continue
        if weight not in stored:
            stored[weight] = _store(module, weight, constants.value(weight))
        node.replace_input_with(weight, stored[weight])
        report.changed.append(node.name)
    return report


def _store(module: fx.GraphModule, weight: fx.Node, value: torch.Tensor) -> fx.Node:
    permuted = value.detach().permute(0, 2, 3, 1).contiguous()
    with module.graph.inserting_before(weight.next):
        constant = add_constant(module, f"{weight.name}_channels_last", permuted, weight)
        constant.meta["val"] = weight.meta["val"].new_empty(permuted.shape)
        return add_call(module.graph, weight, OPERATOR, (constant,))


def _is_image_weight(weight: Any) -> bool:
    value = weight.meta.get("val") if isinstance(weight, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _is_grouped(node: fx.Node, weight: fx.Node) -> bool:
    return bool(arguments_of(node)["groups"] > 1 and weight.meta["val"].shape[1] > 1)
