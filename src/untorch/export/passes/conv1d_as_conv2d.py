"""Gives 1-D convolutions a height of one, because Inductor's Triton convolutions are for images.

Without it, a 1-D convolution on CUDA is always a call of cuDNN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.report import PassReport

__all__ = ["conv1d_as_conv2d"]

_aten = torch.ops.aten
_FORMS = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv1d.padding: _aten.conv2d.padding,
    _aten.convolution.default: _aten.convolution.default,
}
# What an argument has for the new height.
_HEIGHT = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


def conv1d_as_conv2d(module: fx.GraphModule) -> PassReport:
    """Replaces conv(x, w) of [N, C, L] and [O, C, K] by conv(x[:, :, None], w[:, :, None])[:, :, 0].

    Only where Inductor then has a Triton convolution to choose from: not for transposed or dilated ones, nor for a
    depthwise one (groups = channels), which has a template of its own for 1-D. Everything else of the call stays.
    """
    report = PassReport("conv1d_as_conv2d")
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in _FORMS:
            continue
        arguments = arguments_of(node)
        if not _has_dimensions(arguments["input"], 3) and node.target is _aten.convolution.default:
            continue
        if reason := _reason_to_skip(arguments):
            report.skipped[node.name] = reason
            continue
        graph = module.graph
        with graph.inserting_before(node):
            for name in ("input", "weight"):
                arguments[name] = add_call(graph, node, _aten.unsqueeze.default, (arguments[name], -2))
            for name, height in _HEIGHT.items():
                if isinstance(arguments.get(name), list | tuple):
                    values = list(arguments[name])
                    arguments[name] = [height, *values]
            convolution = add_call(graph, node, _FORMS[node.target], tuple(arguments.values()))
            result = add_call(graph, node, _aten.squeeze.dim, (convolution, -2))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        report.changed.append(node.name)
    return report


def _has_dimensions(node: Any, count: int) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == count


def _reason_to_skip(arguments: dict[str, Any]) -> str | None:
    if not _has_dimensions(arguments["input"], 3) or not _has_dimensions(arguments["weight"], 3):
        return "the input has no batch dimension"
    if arguments.get("transposed"):
        return "it is transposed: Inductor has no Triton convolution for it"
    if any(value != 1 for value in arguments["dilation"]):
        return "it is dilated: Inductor has no Triton convolution for it"
    if arguments["groups"] != 1 and arguments["weight"].meta["val"].shape[1] == 1:
        return "it is depthwise: Inductor has a Triton convolution for it as it is"
    return None
