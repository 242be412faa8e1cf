"""Computes convolutions in half types, and the operators between them, in float32: the type that CPU kernels have.

The inputs and results of such a subgraph are converted, instead of every result inside. Batch norm, activations, also
behind views, and sums that follow a convolution belong to it. Everything else stays in the half type. The weights of
dense convolutions are stored in bfloat16 again by ``pack_convolutions`` (``ROUNDED_FROM``), for kernels with AMX or
vdpbf16ps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.attributes import add_constant, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import CONVOLUTIONS, move_activations
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.pack_convolutions import ROUNDED_FROM
from untorch.export.passes.report import PassReport

__all__ = ["widen_half_convolutions"]

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_IN_PLACE = {
    _aten.relu_.default: _aten.relu.default, _aten.relu6_.default: _aten.relu6.default,
    _aten.hardtanh_.default: _aten.hardtanh.default, _aten.hardswish_.default: _aten.hardswish.default,
    _aten.hardsigmoid_.default: _aten.hardsigmoid.default, _aten.silu_.default: _aten.silu.default,
    _aten.gelu_.default: _aten.gelu.default, _aten.leaky_relu_.default: _aten.leaky_relu.default,
    _aten.elu_.default: _aten.elu.default, _aten.sigmoid_.default: _aten.sigmoid.default,
    _aten.tanh_.default: _aten.tanh.default, _aten.clamp_.default: _aten.clamp.default,
    _aten.add_.Tensor: _aten.add.Tensor, _aten.sub_.Tensor: _aten.sub.Tensor, _aten.mul_.Tensor: _aten.mul.Tensor,
    _aten.div_.Tensor: _aten.div.Tensor,
}  # fmt: skip
# What may follow a convolution in its own type, though no other convolution follows.
_EPILOGUE = {*_IN_PLACE, *_IN_PLACE.values(), _aten.batch_norm.default}
_BETWEEN = _EPILOGUE | {
    _aten.cat.default, _aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.adaptive_avg_pool2d.default,
    _aten.adaptive_max_pool2d.default, _aten.mean.dim, _aten.group_norm.default, _aten.instance_norm.default,
    _aten.upsample_nearest2d.vec, _aten.upsample_bilinear2d.vec, _aten.upsample_nearest2d.default,
    _aten.upsample_bilinear2d.default, _aten.constant_pad_nd.default, _aten.pad.default, _aten.mish.default,
    _aten.prelu.default, _aten.softplus.default, _aten.exp.default, _aten.neg.default, _aten.channel_shuffle.default,
    _aten.pixel_shuffle.default, _aten.pixel_unshuffle.default, _aten.reshape.default, _aten.view.default,
    _aten.flatten.using_ints, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.transpose.int, _aten.permute.default,
    _aten.slice.Tensor, _aten.alias.default, _aten.contiguous.default, _aten.clone.default, _aten.dropout.default,
}  # fmt: skip


def widen_half_convolutions(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place."""
    report = PassReport("widen_half_convolutions")
    graph = module.graph
    constants = Constants(module)
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in CONVOLUTIONS]
    move_activations(graph, [node for node in found if _is_half(node)])
    region = _region(graph, constants)
    if not region:
        return report
    wide: dict[fx.Node, fx.Node] = {}
    rounded = []
    for node in region:
        report.changed.append(node.name)
        with graph.inserting_before(node):

            def widened(given: Any, node: fx.Node = node) -> Any:
                if not isinstance(given, fx.Node) or not _is_half(given):
                    return given
                if given not in wide:
                    wide[given] = _widen(module, constants, given, node)
                return wide[given]

            args, kwargs = map_aggregate(node.args, widened), map_aggregate(node.kwargs, widened)
            target: Any = _IN_PLACE.get(node.target, node.target)  # type: ignore[call-overload]
            new = add_call(graph, node, target, tuple(args), dict(kwargs))
            new.meta[ROUNDED_FROM] = node.meta["val"].dtype
            result = add_call(graph, node, _aten.to.dtype, (new, node.meta["val"].dtype))
        wide[result] = new
        rounded.append(result)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    for result in reversed(rounded):
        if not result.users:
            graph.erase_node(result)
    remove_unused(module)
    return report


def _region(graph: fx.Graph, constants: Constants) -> list[fx.Node]:
    """The calls that compute in float32, in graph order: convolutions, and those that lead from one to another."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    convolutions = {n for n in nodes if n.target in CONVOLUTIONS and _is_half(n) and _has_known_weight(n, constants)}
    if not convolutions:
        return []
    aliases, order = Aliases(graph), {node: i for i, node in enumerate(graph.nodes)}
    passing = {n for n in nodes if n.target in _BETWEEN and _is_half(n) and _changes_nothing_else(n, aliases, order)}
    while True:
        region = _connected(nodes, convolutions, passing)
        # What is written in the half type must not have a second copy.
        written = {n for n in region if any(is_mutating(o) and o not in region for o in aliases.group(n))}
        if not written:
            return list(region)
        convolutions, passing = convolutions - written, passing - written


def _connected(nodes: list[fx.Node], convolutions: set[fx.Node], passing: set[fx.Node]) -> dict[fx.Node, None]:
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in convolutions:
            needed.add(node.all_input_nodes[0])
        elif node in needed and node in passing:
            needed.update(node.all_input_nodes)
    region: dict[fx.Node, None] = {}
    for node in nodes:
        if node in convolutions:
            region[node] = None
        elif node in passing and any(source in region for source in node.all_input_nodes):
            follows = node.target in _EPILOGUE and node.args[0] in region
            if node in needed or follows:
                region[node] = None
    return region


def _is_half(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype in _HALF and value.device.type == "cpu"


def _has_known_weight(node: fx.Node, constants: Constants) -> bool:
    return constants.is_known(arguments_of(node)["weight"])


def _changes_nothing_else(node: fx.Node, aliases: Aliases, order: dict[fx.Node, int]) -> bool:
    """Whether a call in place may as well give a new tensor: nothing reads later what it writes into."""
    if node.target not in _IN_PLACE:
        return True
    before = [other for other in aliases.group(node) if order[other] < order[node]]
    return all(
        other.op == "call_function" and all(user is node or order[user] < order[node] for user in other.users)
        for other in before
    )


def _widen(module: fx.GraphModule, constants: Constants, node: fx.Node, reader: fx.Node) -> fx.Node:
    """The node's value in float32, inserted before ``reader``."""
    if node.op != "get_attr" or not constants.is_known(node):
        return add_call(module.graph, node, _aten.to.dtype, (node, torch.float32))
    value = constants.value(node).detach().to(torch.float32)
    with module.graph.inserting_after(node):
        made = add_constant(module, f"{node.name}_float32", value, node)
    made.meta["val"] = node.meta["val"].new_empty(value.shape, dtype=torch.float32)
    return made
