"""Makes one linear layer of two that follow each other, where that is less work.

    W2 (W1 x + b1) + b2  =  (W2 W1) x + (W2 b1 + b2)

Both may be linear layers or 1 x 1 convolutions, with views between that keep the channels together, as in SegFormer's
decoder. The product is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import add_dense_constant, attribute, is_named
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import only_user, value_of
from untorch.export.passes.report import PassReport

__all__ = ["compose_linears"]

_aten = torch.ops.aten
# Operators → the dimension of channels.
_LAYERS: dict[object, int] = {_aten.linear.default: -1, _aten.conv2d.default: 1}
_SIZED_VIEWS = {_aten.view.default, _aten.reshape.default}  # their second argument is the shape
_TRANSPOSES = {_aten.transpose.int, _aten.permute.default}
_VIEWS = {
    *_SIZED_VIEWS, *_TRANSPOSES, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.flatten.using_ints,
    _aten.contiguous.default,
}  # fmt: skip
# So much of the two layers' work is left at most.
_SHARE = 0.9


@dataclass(frozen=True)
class _Layer:
    """A linear layer, or a 1 x 1 convolution, with rows of its weight as outputs."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def outputs(self) -> int:
        return int(self.weight.meta["val"].shape[0])

    @property
    def inputs(self) -> int:
        return int(self.weight.meta["val"].shape[1])


def compose_linears(module: fx.GraphModule, keep: Sequence[str] = ()) -> PassReport:
    """Runs the pass in place.

    keep: patterns of the names of weights, or of their layers, that stay as they are.
    """
    report = PassReport("compose_linears")
    constants: Constants | None = None
    aliases: Aliases | None = None
    for node in list(module.graph.nodes):
        second = _read(node)
        found = _layer_before(second) if second is not None else None
        if second is None or found is None:
            continue
        first, views, places = found
        if constants is None or aliases is None:
            constants, aliases = Constants(module), Aliases(module.graph)
        reason = _reason_to_skip(first, views, second, constants, aliases, keep)
        if reason is None and _is_used_elsewhere(module, first.weight, second.weight):
            reason = "a weight is used elsewhere, too: it would be stored as well"
        if reason is not None:
            report.skipped[node.name] = reason
            continue
        report.changed.append(f"{first.node.name}, {node.name}")
        _replace(module, first, dict(zip(views, places, strict=True)), second, constants)
        constants = aliases = None  # of the graph that was
    return report


def _read(node: fx.Node) -> _Layer | None:
    if node.op != "call_function" or node.target not in _LAYERS:
        return None
    given = arguments_of(node)
    weight, value = given["weight"], value_of(given["weight"])
    if value is None or value_of(given["input"]) is None or not isinstance(weight, fx.Node):
        return None
    if node.target == _aten.linear.default:
        return _Layer(node, given["input"], weight, given["bias"]) if value.dim() == 2 else None
    is_plain = (
        list(value.shape[2:]) == [1, 1]
        and given["groups"] == 1
        and set(given["stride"]) == {1}
        and given["padding"] in ([0], [0, 0])
        and value_of(given["input"]).dim() == 4  # type: ignore[union-attr]
    )
    return _Layer(node, given["input"], weight, given["bias"]) if is_plain else None


def _layer_before(second: _Layer) -> tuple[_Layer, list[fx.Node], list[int]] | None:
    """The layer whose channels ``second`` mixes, the views between in their order, and the channels' dimensions behind
    each.
    """
    views: list[fx.Node] = []
    node = second.x
    while node.op == "call_function" and node.target in _VIEWS and only_user(node) is not None:
        views.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    first = _read(node)
    if first is None or only_user(node) is None or first.outputs == 1:  # one channel could be any dimension of 1
        return None
    places = _places(views, first)
    if places is None:
        return None
    before = _LAYERS[first.node.target] % first.node.meta["val"].dim()
    wanted = _LAYERS[second.node.target] % second.x.meta["val"].dim()
    return (first, views, places) if [before, *places][-1] == wanted else None


def _places(views: list[fx.Node], first: _Layer) -> list[int] | None:
    """The dimension of the channels behind each view; None if one cuts them, or joins them with others."""
    before: Any = first.node.meta["val"]
    place, found = _LAYERS[first.node.target] % before.dim(), []
    for view in views:
        after = view.meta["val"]
        if view.target in _TRANSPOSES:
            given: Any = view.args[1:]
            order = list(range(before.dim()))
            if view.target == _aten.permute.default:
                order = [dim % before.dim() for dim in given[0]]
            else:
                a, b = (dim % before.dim() for dim in given)
                order[a], order[b] = order[b], order[a]
            place = order.index(place)
        else:
            kept = [
                dim for dim in range(after.dim())
                if statically_known_true(after.shape[dim] == before.shape[place])
                and statically_known_true(math.prod(after.shape[:dim]) == math.prod(before.shape[:place]))
            ]  # fmt: skip
            if not kept:
                return None
            place = kept[0]
        found.append(place)
        before = after
    return found


def _reason_to_skip(
    first: _Layer, views: list[fx.Node], second: _Layer, constants: Constants, aliases: Aliases, keep: Sequence[str]
) -> str | None:  # fmt: skip
    apart = first.outputs * (first.inputs + second.outputs)
    if first.inputs * second.outputs > _SHARE * apart:
        return "one layer would be as much work as both"
    for operand in (first.weight, first.bias, second.weight, second.bias):
        if operand is None:
            continue
        if not constants.is_known(operand):
            return "a weight or bias is computed, or the model writes into it: it is no constant"
        if any(is_named(str(operand.target), pattern) for pattern in keep):
            return "the option keep_weights names one of the weights"
    dtypes = {layer.weight.meta["val"].dtype for layer in (first, second)}
    if len(dtypes) != 1 or not dtypes.pop().is_floating_point:
        return "the layers have several dtypes"
    if any(aliases.is_written(node) for node in (first.node, *views, second.node)):
        return "the model writes into its input or its result"
    layers = {first.node.target, second.node.target}
    keeps_strides = layers == {_aten.linear.default} and all(view.target not in _TRANSPOSES for view in views)
    if not keeps_strides and any(user.op == "output" or user.target in _VIEWS for user in second.node.users):
        return "its strides are seen: its result is one of the model's, or viewed"
    return None


def _is_used_elsewhere(module: fx.GraphModule, *weights: fx.Node) -> bool:
    """Whether something else reads a tensor in the memory of one of the weights."""
    if any(len(weight.users) > 1 for weight in weights):
        return True
    memory = {_memory(module, weight) for weight in weights if weight.op == "get_attr"}
    others = (node for node in module.graph.nodes if node.op == "get_attr" and node not in weights and node.users)
    return any(_memory(module, node) in memory for node in others)


def _memory(module: fx.GraphModule, node: fx.Node) -> int | None:
    value = attribute(module, str(node.target))
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _replace(
    module: fx.GraphModule, first: _Layer, views: dict[fx.Node, int], second: _Layer, constants: Constants
) -> None:
    """views: with the dimension of the channels behind each."""
    graph, dtype = module.graph, first.weight.meta["val"].dtype
    rows = constants.value(second.weight).detach().flatten(1).float()
    weight = rows @ constants.value(first.weight).detach().flatten(1).float()
    if first.node.target == _aten.conv2d.default:
        weight = weight[:, :, None, None]
    biases = []
    if first.bias is not None:
        biases.append(rows @ constants.value(first.bias).detach().float())
    if second.bias is not None:
        biases.append(constants.value(second.bias).detach().float())
    name = second.node.name
    with graph.inserting_before(second.node):
        operands = [add_dense_constant(module, f"{name}_composed_weight", weight.to(dtype), first.weight)]
        if biases:
            bias = torch.stack(biases).sum(0)
            operands.append(add_dense_constant(module, f"{name}_composed_bias", bias.to(dtype), first.weight))
        result = add_call(graph, first.node, first.node.target, (first.x, *operands))
        for view, place in views.items():
            args: list[Any] = list(view.args[1:])
            if view.target in _SIZED_VIEWS and args[0][place] != -1:
                args[0] = [*args[0][:place], second.outputs, *args[0][place + 1 :]]
            result = add_call(graph, view, view.target, (result, *args), dict(view.kwargs))
    second.node.replace_all_uses_with(result)
    for node in (second.node, *reversed(list(views)), first.node):
        graph.erase_node(node)
