"""Puts constant factors and summands of channels behind a convolution into its weight and bias.

conv(x, W, b) · s + t with s and t of shape [1, C, 1, 1]: batch norm with fixed statistics, as DETR, RT-DETR and
torchvision's detection models have it, without the operator of that name. The weight is computed in float64.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import add_dense_constant, is_named, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import ADDITIONS, CONVOLUTIONS, is_transposed, writes_between
from untorch.export.passes.epilogues import only_user, same_layout, value_of
from untorch.export.passes.report import PassReport

__all__ = ["fold_channel_factors"]

_aten = torch.ops.aten
_PRODUCTS = (_aten.mul.Tensor, _aten.mul_.Tensor)


def fold_channel_factors(module: fx.GraphModule, keep: tuple[str, ...] = ()) -> PassReport:
    """Runs the pass in place.

    keep: names and patterns of weights that stay as they are.
    """
    report = PassReport("fold_channel_factors")
    graph = module.graph
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in CONVOLUTIONS]
    if not found:
        return report
    constants, aliases = Constants(module), Aliases(graph)
    folded: list[tuple[fx.Node, list[tuple[fx.Node, fx.Node]]]] = []
    for node in found:
        arguments = arguments_of(node)
        operands = [operand for operand in (arguments["weight"], arguments["bias"]) if operand is not None]
        x, weight = value_of(arguments["input"]), value_of(arguments["weight"])
        if x is None or weight is None or x.dim() != weight.dim() or not weight.is_floating_point():
            continue
        if is_transposed(node) or not all(constants.is_known(operand) for operand in operands):
            continue
        names = [str(operand.target) for operand in operands if operand.op == "get_attr"]
        if any(is_named(name, form) for name in names for form in keep):
            continue
        steps = _steps(node, constants)
        memory = set(aliases.group(arguments["input"]))
        while steps and writes_between(node, steps[-1][0], memory, [each for each, _ in steps]):
            steps.pop()
        if steps:
            folded.append((node, steps))
    for node, steps in folded:  # what one gives may be the input of the next
        report.changed.append(" + ".join([node.name, *(step.name for step, _ in steps)]))
        _replace(module, node, steps, constants)
    remove_unused(module)
    return report


def _steps(node: fx.Node, constants: Constants) -> list[tuple[fx.Node, fx.Node]]:
    """The products and sums that follow, each with its constant."""
    steps: list[tuple[fx.Node, fx.Node]] = []
    last = node
    while (user := only_user(last)) is not None:
        if user.target not in (*_PRODUCTS, *ADDITIONS) or user.kwargs.get("alpha", 1) != 1:
            break
        left, right = user.args[:2]
        other = right if left is last else left
        in_place = user.target in (_aten.mul_.Tensor, _aten.add_.Tensor)
        if not isinstance(other, fx.Node) or other is last or (in_place and left is not last):
            break
        if not constants.is_known(other) or not _is_of_channels(other, last) or not same_layout(user, last):
            break
        steps.append((user, other))
        last = user
    return steps


def _is_of_channels(constant: fx.Node, like: fx.Node) -> bool:
    """Whether the constant has a value for each channel of ``like`` and is the same everywhere else."""
    value, result = value_of(constant), value_of(like)
    if value is None or result is None or value.dtype != result.dtype or value.dim() > result.dim():
        return False
    sizes = [1] * (result.dim() - value.dim()) + list(value.shape)
    return all(size == (result.shape[1] if d == 1 else 1) for d, size in enumerate(sizes))


def _replace(module: fx.GraphModule, node: fx.Node, steps: list[tuple[fx.Node, fx.Node]], constants: Constants) -> None:
    graph, arguments = module.graph, arguments_of(node)
    original = arguments["weight"]
    weight = constants.value(original).detach().double()
    bias = weight.new_zeros(weight.shape[0])
    if arguments["bias"] is not None:
        bias = bias + constants.value(arguments["bias"]).detach()
    for step, other in steps:
        value = constants.value(other).detach().double().flatten()
        if step.target in _PRODUCTS:
            weight, bias = weight * value.reshape(-1, *[1] * (weight.dim() - 1)), bias * value
        else:
            bias = bias + value
    dtype, last = original.meta["val"].dtype, steps[-1][0]
    with graph.inserting_after(original):
        stored = add_dense_constant(module, f"{original.name}_scaled", weight.to(dtype), original)
        added = add_dense_constant(module, f"{original.name}_scaled_bias", bias.to(dtype), original)
    with graph.inserting_before(last):
        assert isinstance(node.target, torch._ops.OpOverload)
        call = arguments | {"weight": stored, "bias": added}
        folded = add_call(graph, node, node.target, tuple(call.values()))
    last.replace_all_uses_with(folded)
    for old, _ in reversed(steps):
        graph.erase_node(old)
    graph.erase_node(node)
