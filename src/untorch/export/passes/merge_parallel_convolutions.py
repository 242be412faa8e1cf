"""Makes one convolution of the sum of convolutions of one input: RepVGG's blocks, as they are trained.

conv(x, W, b) + conv(x, V, c) + batch_norm(x) is linear in x. A smaller kernel lies in the middle of a larger one, and
batch norm of the input is a 1 x 1 convolution of each channel with itself. Weights are summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import add_dense_constant, is_named, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import (
    ADDITIONS,
    CONVOLUTIONS,
    fold_batch_norm,
    is_inference_norm,
    is_transposed,
    pads_unevenly,
    sizes_of,
    writes_between,
)
from untorch.export.passes.epilogues import only_user, same_layout, value_of
from untorch.export.passes.report import PassReport

__all__ = ["merge_parallel_convolutions"]

_aten = torch.ops.aten
_TARGETS = {3: _aten.conv1d.default, 4: _aten.conv2d.default, 5: _aten.conv3d.default}
_NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass
class _Branch:
    """One addend: a convolution with batch norm or without, or batch norm of the input alone."""

    nodes: list[fx.Node]
    source: fx.Node
    convolution: fx.Node | None
    norm: fx.Node | None
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    def fits_into(self, other: _Branch) -> bool:
        """Whether the kernel lies in the middle of the other's, over the same pixels."""
        if self.convolution is None:
            if set(other.stride) != {1}:
                return False
            return all(
                size % 2 and 2 * padding == step * (size - 1)
                for size, padding, step in zip(other.kernel, other.padding, other.dilation, strict=True)
            )
        if (self.stride, self.groups) != (other.stride, other.groups):
            return False
        for small, large, own, outer, step, wide in zip(
            self.kernel, other.kernel, self.padding, other.padding, self.dilation, other.dilation, strict=True
        ):
            if small > large or (large - small) % 2 or outer - own != wide * (large - small) // 2:
                return False
            if small > 1 and step != wide:
                return False
        return True

    def operands(self, constants: Constants, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias in float64; ``like`` is the weight that they are added to."""
        if self.convolution is None:
            each = like.shape[1]
            weight = torch.eye(each, dtype=torch.float64, device=like.device).repeat(like.shape[0] // each, 1)
            weight, bias = weight.reshape(*like.shape[:2], *[1] * (like.dim() - 2)), None
        else:
            arguments = arguments_of(self.convolution)
            weight = constants.value(arguments["weight"]).detach().double()
            bias = None if arguments["bias"] is None else constants.value(arguments["bias"]).detach().double()
        if self.norm is not None:
            norm = arguments_of(self.norm)
            values = [None if norm[name] is None else constants.value(norm[name]).detach() for name in _NORM]
            weight, bias = fold_batch_norm(weight, bias, values, norm["eps"])
        return weight, bias


def merge_parallel_convolutions(module: fx.GraphModule, keep: tuple[str, ...] = ()) -> PassReport:
    """Runs the pass in place.

    keep: names and patterns of weights that stay as they are.
    """
    report = PassReport("merge_parallel_convolutions")
    graph = module.graph
    if not any(node.op == "call_function" and node.target in CONVOLUTIONS for node in graph.nodes):
        return report
    constants, aliases = Constants(module), Aliases(graph)
    seen: set[fx.Node] = set()
    for node in reversed([n for n in graph.nodes if _is_sum(n)]):
        if node in seen:
            continue  # part of a longer sum
        sums, addends = _addends(node)
        seen.update(sums)
        dtype = node.meta["val"].dtype
        found = (_branch(addend, constants, keep, dtype) for addend in addends)
        branches = [branch for branch in found if branch is not None]
        largest = max(
            (branch for branch in branches if branch.convolution is not None),
            key=lambda branch: torch.Size(branch.kernel).numel(), default=None,
        )  # fmt: skip
        if largest is None:
            continue
        same = [
            branch
            for branch in branches
            if branch is largest or (branch.source is largest.source and branch.fits_into(largest))
        ]
        own = [inner for branch in same for inner in branch.nodes]
        first = next(n for n in graph.nodes if n in own)
        if len(same) < 2 or writes_between(first, node, set(aliases.group(largest.source)), [*own, *sums]):
            continue
        report.changed.append(" + ".join(branch.nodes[-1].name for branch in same))
        _replace(module, node, sums, addends, largest, same, constants)
    remove_unused(module)
    return report


def _is_sum(node: fx.Node) -> bool:
    return bool(node.op == "call_function" and node.target in ADDITIONS and node.kwargs.get("alpha", 1) == 1)


def _addends(root: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The sums of a tree, the last one first, and what they add; no addends where one is broadcast or overwritten."""
    sums, addends = [root], []
    for place, operand in enumerate(root.args[:2]):
        if isinstance(operand, int | float) and operand == 0:
            continue  # where a loop's sum begins
        if not isinstance(operand, fx.Node) or not same_layout(operand, root):
            return [root], []
        if _is_sum(operand) and only_user(operand) is root:
            inner, more = _addends(operand)
            if more:
                sums += inner
                addends += more
                continue
        if place == 0 and root.target == _aten.add_.Tensor:  # it writes into this one
            fresh = operand.target in CONVOLUTIONS or operand.target == _aten.batch_norm.default
            if not fresh or only_user(operand) is not root:
                return [root], []
        addends.append(operand)
    return sums, addends


def _branch(value: fx.Node, constants: Constants, keep: tuple[str, ...], dtype: torch.dtype) -> _Branch | None:
    """The addend as one; None where it is something else."""
    if only_user(value) is None or value.op != "call_function":
        return None
    norm = None
    convolution: fx.Node | None = value
    if value.target == _aten.batch_norm.default:
        source = value.args[0]
        if not isinstance(source, fx.Node) or not is_inference_norm(value, source, constants):
            return None
        norm, convolution = value, source
        if source.target not in CONVOLUTIONS or only_user(source) is not value:
            return None if _is_kept(value, keep) else _Branch([value], source, None, value)
    if convolution is None or convolution.target not in CONVOLUTIONS or _is_kept(convolution, keep):
        return None
    arguments = arguments_of(convolution)
    x, weight = value_of(arguments["input"]), value_of(arguments["weight"])
    if is_transposed(convolution) or x is None or weight is None or x.dim() != weight.dim():
        return None
    known = [operand for operand in (arguments["weight"], arguments["bias"]) if operand is not None]
    if not all(constants.is_known(operand) for operand in known) or pads_unevenly(arguments, weight.shape[2:]):
        return None
    if not weight.is_floating_point() or weight.dtype != dtype or (norm is not None and _is_kept(norm, keep)):
        return None
    kernel, stride, padding, dilation = (tuple(each) for each in sizes_of(arguments, list(weight.shape[2:])))
    nodes = [convolution] if norm is None else [convolution, norm]
    return _Branch(
        nodes, arguments["input"], convolution, norm, arguments["groups"], kernel, stride, padding, dilation
    )  # fmt: skip


def _is_kept(node: fx.Node, keep: tuple[str, ...]) -> bool:
    names = [str(operand.target) for operand in node.all_input_nodes if operand.op == "get_attr"]
    return any(is_named(name, form) for name in names for form in keep)


def _replace(
    module: fx.GraphModule,
    node: fx.Node,
    sums: list[fx.Node],
    addends: list[fx.Node],
    largest: _Branch,
    same: list[_Branch],
    constants: Constants,
) -> None:
    graph = module.graph
    assert largest.convolution is not None
    arguments = arguments_of(largest.convolution)
    dtype = arguments["weight"].meta["val"].dtype
    weight, bias = largest.operands(constants, torch.empty(0))
    for branch in same:
        if branch is largest:
            continue
        more, offset = branch.operands(constants, weight)
        margins = [(large - small) // 2 for large, small in zip(weight.shape[2:], more.shape[2:], strict=True)]
        weight = weight + F.pad(more, [margin for each in reversed(margins) for margin in (each, each)])
        if offset is not None:
            bias = offset if bias is None else bias + offset
    name = f"{arguments['weight'].name}_merged"
    with graph.inserting_after(arguments["weight"]):
        stored = add_dense_constant(module, name, weight.to(dtype), arguments["weight"])
        added = None
        if bias is not None:
            added = add_dense_constant(module, f"{name}_bias", bias.to(dtype), arguments["weight"])
    merged = {branch.nodes[-1] for branch in same}
    lists = [list(each) for each in (largest.stride, largest.padding, largest.dilation)]
    with graph.inserting_before(node):
        call = (largest.source, stored, added, *lists, largest.groups)
        total = add_call(graph, largest.convolution, _TARGETS[weight.dim()], call)
        for addend in addends:
            if addend not in merged:
                total = add_call(graph, node, _aten.add.Tensor, (total, addend))
    node.replace_all_uses_with(total)
    for old in sums:
        graph.erase_node(old)
    for branch in same:
        for old in reversed(branch.nodes):
            graph.erase_node(old)
