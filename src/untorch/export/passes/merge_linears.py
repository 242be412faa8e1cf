"""Merges linear layers of the same input into one GEMM on the concatenated weight: q, k and v; gate and up.

A GEMV reads its weight once and is bound by memory; a small one does not last long enough to reach the memory's speed.
One GEMM with the outputs of all siblings reads the same bytes in one launch. Its result is sliced along the last
dimension. The slices are views: generated kernels read them where they are, and a layer stays apart where something
behind it would need a copy.

The layers are found by what they compute, quantised or not. Weights that something else reads, that the model writes,
or that ``keep`` names stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import attribute, is_named, remove_unused, set_attribute, unused_name
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.equal_nodes import equal_nodes
from untorch.export.passes.linear_calls import LinearCall, read_linear
from untorch.export.passes.merged_weights import byte_range, merge_tensors
from untorch.export.passes.report import PassReport
from untorch.export.passes.strides import propagate
from untorch.ops import int4, nvfp4, w8a8

__all__ = ["MERGED", "merge_linears"]

_aten = torch.ops.aten

# In a module's meta: for each merged layer the names of its tensors, and those of its parts.
MERGED = "untorch_merged_linears"

_ALIGNMENT = 16  # bytes, of each slice: vector loads, and the rows of cuBLAS's fast kernels
# Layers that follow others which depend on the first: their results would be kept until then. So many times the
# input's width at most.
_KEPT_WIDTH = 16


def merge_linears(module: fx.GraphModule, keep: Sequence[str] = ()) -> PassReport:
    """Runs the pass in place. The parts are dropped from the module; the caller's tensors become views of the whole.

    keep: patterns of the names of weights, or of their layers, that stay apart.
    """
    report = PassReport("merge_linears")
    merger = _Merger(module, keep, report)
    groups = merger.groups()
    if not groups:
        return report
    stored: dict[tuple[str, ...], tuple[str, ...]] = {}
    for group in groups:
        merger.merge(group, stored)
    for node in reversed(module.graph.nodes):  # transposes of parts
        if node.op == "call_function" and not node.users and merger.is_transpose_of_part(node):
            module.graph.erase_node(node)
    remove_unused(module)
    return report


class _Merger:
    """What the pass knows of a graph before it changes it."""

    def __init__(self, module: fx.GraphModule, keep: Sequence[str], report: PassReport) -> None:
        self._module, self._graph, self._keep, self._report = module, module.graph, keep, report
        self._calls = {node: call for node in self._graph.nodes if (call := read_linear(node)) is not None}

    def groups(self) -> list[list[LinearCall]]:
        """The calls that become one, in the graph's order; what stays apart is reported."""
        if len(self._calls) < 2:
            return []
        self._aliases = Aliases(self._graph)
        self._equal = equal_nodes(self._graph, self._aliases)
        siblings: dict[fx.Node, list[LinearCall]] = defaultdict(list)
        for call in self._calls.values():
            siblings[self._equal[call.x]].append(call)
        self._readers = self._readers_of_tensors()
        found: list[list[LinearCall]] = []
        for calls in siblings.values():
            if len(calls) < 2:
                continue
            kinds: dict[tuple[Any, ...], list[LinearCall]] = defaultdict(list)
            for call in calls:
                if reason := self._reason_to_skip(call):
                    self._report.skipped[call.node.name] = reason
                else:
                    kinds[call.kind].append(call)
            for same in kinds.values():
                if len(same) == 1:
                    self._report.skipped[same[0].node.name] = (
                        "no other layer of its input that can be merged has its dtype and quantisation"
                    )
                    continue
                found += self._by_lifetime(same)
        return self._with_own_weights(found)

    def merge(self, group: list[LinearCall], stored: dict[tuple[str, ...], tuple[str, ...]]) -> None:
        """One call in the place of the group's. stored: names of the tensors that parts became."""
        group, values = self._readable(group)
        if len(group) < 2:
            return
        graph, first = self._graph, group[0]
        parts = tuple(str(call.weights[0].target) for call in group)
        if parts not in stored:
            stored[parts] = self._store(group)
        with graph.inserting_before(first.node):
            weights = []
            for name, like in zip(stored[parts], first.weights, strict=True):
                weight = graph.get_attr(name)
                value = like.meta["val"]
                tensor = attribute(self._module, name)
                weight.meta = dict(like.meta)
                weight.meta["val"] = value.new_empty(tensor.shape)
                weights.append(weight)
            bias = self._bias(group)
            merged = self._call(group, weights, bias)
            start = 0
            for call in group:
                end = start + call.outputs
                rank = merged.meta["val"].dim()
                part = add_call(graph, call.node, _aten.slice.Tensor, (merged, rank - 1, start, end))
                call.node.replace_all_uses_with(part)
                start = end
        for node, value in values.items():
            if node not in self._calls:
                node.meta["val"] = value
        for call in group:
            graph.erase_node(call.node)
        self._report.changed.append(" + ".join(call.node.name for call in group))

    def is_transpose_of_part(self, node: fx.Node) -> bool:
        """Whether the node turned a weight that has become part of another."""
        return node in self._turned

    def _call(self, group: list[LinearCall], weights: list[fx.Node], bias: fx.Node | None) -> fx.Node:
        """The call, where the graph inserts at the moment."""
        first = group[0]
        graph, x = self._graph, first.x
        if first.family == "linear":
            return add_call(graph, first.node, _aten.linear.default, (x, weights[0], bias))
        if first.family == "mm":
            if bias is None:
                return add_call(graph, first.node, _aten.matmul.default, (x, weights[0]))
            return add_call(graph, first.node, _aten.addmm.default, (bias, x, weights[0]))
        given = arguments_of(first.node)
        if first.family == "int4":
            return add_call(graph, first.node, int4.OPERATOR, (x, *weights, given["group_size"], bias))
        if first.family == "w8a8":
            return add_call(graph, first.node, w8a8.OPERATOR, (x, *weights, bias))
        return add_call(graph, first.node, nvfp4.OPERATOR, (x, *weights, bias, given["prefill"]))

    def _store(self, group: list[LinearCall]) -> tuple[str, ...]:
        """Gives the module the merged tensors; their names."""
        names = []
        for i, dim in enumerate(group[0].dims):
            targets = [str(call.weights[i].target) for call in group]
            parts = [attribute(self._module, target) for target in targets]
            if parts[0].dtype == torch.float32 and group[0].family == "nvfp4":  # one global scale, or one a row
                parts = [
                    part if part.shape == (call.outputs,) else part.reshape(1).expand(call.outputs)
                    for part, call in zip(parts, group, strict=True)
                ]
            whole = merge_tensors(parts, dim)
            name = unused_name(self._module, _merged_name(targets))
            is_parameter = isinstance(attribute(self._module, targets[0]), torch.nn.Parameter)
            set_attribute(self._module, name, torch.nn.Parameter(whole, requires_grad=False) if is_parameter else whole)
            names.append(name)
        of_parts = [tuple(str(weight.target) for weight in call.weights) for call in group]
        self._module.meta.setdefault(MERGED, []).append((tuple(names), tuple(of_parts)))
        return tuple(names)

    def _bias(self, group: list[LinearCall]) -> fx.Node | None:
        """The biases one behind the other, with zeros for layers that have none; None if none has one."""
        given = [call.bias for call in group]
        like = next((bias for bias in given if bias is not None), None)
        if like is None:
            return None
        tensor = attribute(self._module, str(like.target))
        values = [
            tensor.new_zeros(call.outputs) if call.bias is None else attribute(self._module, str(call.bias.target))
            for call in group
        ]
        whole = torch.cat([value.detach() for value in values])
        names = [str((call.bias or call.weights[0]).target) for call in group]
        name = unused_name(self._module, _merged_name(names) + ("" if all(given) else "_bias"))
        set_attribute(self._module, name, whole)
        node = self._graph.get_attr(name)
        node.meta = dict(like.meta)
        node.meta["val"] = like.meta["val"].new_empty(whole.shape)
        return node

    def _reason_to_skip(self, call: LinearCall) -> str | None:
        """Why the call stays apart, whatever its siblings are."""
        for weight in call.weights:
            tensor = attribute(self._module, str(weight.target))
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
                return f"its weight is no plain tensor but {type(tensor).__name__}"
            if self._aliases.is_written(weight):
                return "the model writes its weight"
            if any(is_named(str(weight.target), pattern) for pattern in self._keep):
                return "the option keep_weights names it"
        bias = value_of(call.bias)
        if call.bias is not None and (
            bias is None or call.bias.op != "get_attr" or self._aliases.is_written(call.bias)
            or bias.shape != (call.outputs,) or bias.dtype != call.node.meta["val"].dtype
        ):  # fmt: skip
            return "its bias is not a constant of one number for each output"
        if call.family == "mm" and call.bias is not None and call.x.meta["val"].dim() != 2:
            return "its bias is added to more than rows"
        size = call.outputs * call.node.meta["val"].element_size()
        if size % _ALIGNMENT:
            return f"its row of results has {size} bytes, no multiple of {_ALIGNMENT}"
        if self._aliases.is_written(call.x):
            return "the model writes its input"
        if self._aliases.is_written(call.node):
            return "the model writes its result"
        return None

    def _by_lifetime(self, calls: list[LinearCall]) -> list[list[LinearCall]]:
        """Parts of a group whose results are not kept for long, unless they are small."""
        groups = [[calls[0]]]
        for call in calls[1:]:
            group = groups[-1]
            width = sum(member.outputs for member in group) + call.outputs
            if width > _KEPT_WIDTH * call.inputs and self._follows(group, call):
                groups.append([call])
            else:
                group.append(call)
        for group in groups:
            if len(group) == 1:
                self._report.skipped[group[0].node.name] = (
                    "layers that depend on its siblings come before it: their results would have to be kept"
                )
        return [group for group in groups if len(group) > 1]

    def _follows(self, group: list[LinearCall], call: LinearCall) -> bool:
        """Whether another linear layer that depends on the group comes before the call."""
        dependent = {member.node for member in group}
        members = set(dependent)
        node = group[0].node
        while node is not call.node:
            if node not in members and any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
                if node in self._calls:
                    return True
            node = node.next
        return False

    def _with_own_weights(self, groups: list[list[LinearCall]]) -> list[list[LinearCall]]:
        """Without the calls whose weight is read elsewhere. Groups of the same weights share the whole."""
        while True:
            where: dict[fx.Node, tuple[str, ...]] = {
                call.node: tuple(str(member.weights[0].target) for member in group)
                for group in groups
                for call in group
            }
            apart = set()
            for group in groups:
                names = where[group[0].node]
                for call in group:
                    readers = {reader for weight in call.weights for reader in self._readers[str(weight.target)]}
                    others = [reader for reader in readers if where.get(reader) != names]
                    if others or names.count(str(call.weights[0].target)) > 1:
                        apart.add(call.node)
                        by = ", ".join(sorted(reader.name for reader in others)) or "a sibling"
                        self._report.skipped[call.node.name] = f"its weight is also read by {by}"
            if not apart:
                return groups
            left = [[call for call in group if call.node not in apart] for group in groups]
            for group in left:
                if len(group) == 1:
                    self._report.skipped[group[0].node.name] = "its siblings stay apart"
            groups = [group for group in left if len(group) > 1]

    def _readers_of_tensors(self) -> dict[str, set[fx.Node]]:
        """By the name of a tensor: the calls that read its memory, those of a transpose for the transpose."""
        users: dict[str, set[fx.Node]] = defaultdict(set)
        ranges: dict[str, tuple[int, int]] = {}
        self._turned: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op != "get_attr":
                continue
            value = attribute(self._module, str(node.target))
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta":
                ranges[str(node.target)] = byte_range(value)
            for user in node.users:
                linears = [reader for reader in user.users if reader in self._calls]
                is_turned = any(self._calls[reader].weights[0] is node for reader in linears)
                if is_turned:
                    self._turned.add(user)
                users[str(node.target)] |= set(user.users) if is_turned else {user}
        found = {name: set(users[name]) for name in ranges} | {name: set(readers) for name, readers in users.items()}
        end, last = 0, ""
        for start, stop, name in sorted((start, stop, name) for name, (start, stop) in ranges.items()):
            if start < end:  # one memory by two names
                both = found[name] | found[last]
                found[name] = found[last] = both
            if stop > end:
                end, last = stop, name
        return defaultdict(set, found)

    def _readable(self, group: list[LinearCall]) -> tuple[list[LinearCall], dict[fx.Node, Any]]:
        """The members whose results can be slices, and the values of nodes behind them that get other strides."""
        positions = {node: i for i, node in enumerate(self._graph.nodes)}
        while len(group) > 1:
            values: dict[fx.Node, Any] = {}
            total, start = sum(call.outputs for call in group), 0
            x = group[0].x.meta["val"]
            whole = group[0].node.meta["val"].new_empty((*x.shape[:-1], total))
            for call in group:
                values[call.node] = whole[..., start : start + call.outputs]
                start += call.outputs
            failed = None
            for call in group:
                if reason := propagate(call.node, values, positions):
                    self._report.skipped[call.node.name] = reason
                    failed = call
                    break
            if failed is None:
                return group, values
            group = [call for call in group if call is not failed]
            if len(group) == 1:
                self._report.skipped[group[0].node.name] = "its siblings stay apart"
        return [], {}


def _merged_name(targets: Iterable[str]) -> str:
    """Of "layer.q.weight" and "layer.k.weight": "layer_q_k_weight"."""
    paths = [target.split(".") for target in targets]
    shortest = min(map(len, paths))
    same = [len({path[i] for path in paths}) == 1 for i in range(shortest)]
    head = same.index(False) if False in same else shortest
    same = [len({path[-1 - i] for path in paths}) == 1 for i in range(shortest - head)]
    tail = same.index(False) if False in same else shortest - head
    middle = ["_".join(path[head : len(path) - tail]) for path in paths]
    if len(middle) > 4:
        middle = [middle[0], "to", middle[-1]]
    return "_".join([*paths[0][:head], *middle, *(paths[0][len(paths[0]) - tail :] if tail else ())])
