"""Selects rows before the layers that compute each row by itself, and not after them.

    (x + mlp(norm(x)))[rows]  =  x[rows] + mlp(norm(x[rows]))

A classifier reads one token of what its last layer computes, and a language model's prefill the last one of each
sequence. The selection moves up, to where rows are mixed: the keys and values of the last layer's attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.decoder_match import is_check
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.probes import SHAPE_ONLY, operator_name
from untorch.export.passes.report import PassReport
from untorch.ops import int4, int4_moe, int8, nvfp4, nvfp4_moe, w8a8
from untorch.ops.attention.operator import OPERATOR as ATTENTION

__all__ = ["select_rows_early"]

_aten = torch.ops.aten
# Of the example inputs, at most one of so many rows is selected.
_FEWEST_ROWS = 8

# A node's operands whose rows are its rows, with the dimension that they lie along; None: rows are mixed.
_Operands = list[tuple[fx.Node, int]] | None

_LINEARS = {
    _aten.linear.default: ("input",), _aten.mm.default: ("self",), _aten.addmm.default: ("mat1",),
    int4.OPERATOR: ("x",), nvfp4.OPERATOR: ("x",), w8a8.OPERATOR: ("x",), int8.OPERATOR: ("x", "residual"),
    int4_moe.OPERATOR: ("hidden_states", "topk_weights", "topk_ids"),
    nvfp4_moe.OPERATOR: ("hidden_states", "topk_weights", "topk_ids"),
}  # fmt: skip
# Pointwise without the tag.
_COPIES = {
    _aten.to.dtype, _aten.to.dtype_layout, _aten._to_copy.default, _aten.clone.default, _aten.contiguous.default,
    _aten.alias.default, _aten.detach.default, _aten.type_as.default,
}  # fmt: skip
_TRANSPOSES = {_aten.transpose.int, _aten.permute.default}
_ATTENTIONS = {_aten.scaled_dot_product_attention.default, ATTENTION}
_NORMS = {_aten.layer_norm.default, _aten.rms_norm.default}
# Of one tensor, along dimensions that are given.
_ALONG = {
    "mean", "sum", "amax", "amin", "softmax", "_softmax", "log_softmax", "_log_softmax", "topk", "chunk", "split",
    "split_with_sizes", "slice", "select", "cumsum",
}  # fmt: skip


def select_rows_early(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place."""
    report = PassReport("select_rows_early")
    found = [(node, dim) for node in module.graph.nodes if (dim := _selected_dim(node)) is not None]
    aliases: Aliases | None = None
    for node, dim in found:
        aliases = aliases or Aliases(module.graph)
        region = _region(node, dim, aliases)
        if any(each.target in _LINEARS for each in region):
            _replace(module.graph, node, dim, region)
            report.changed.append(node.name)
            aliases = None
    return report


def _selected_dim(node: fx.Node) -> int | None:
    """The dimension along which the node selects few rows of a tensor with columns."""
    if node.op != "call_function" or node.target not in (
        _aten.select.int, _aten.slice.Tensor, _aten.index_select.default, _aten.index.Tensor
    ):  # fmt: skip
        return None
    given = arguments_of(node)
    before, after = value_of(given["self"]), value_of(node)
    if before is None or after is None or before.dim() < 2:
        return None
    if node.target == _aten.index.Tensor:
        places = [i for i, index in enumerate(given["indices"]) if index is not None]
        index = value_of(given["indices"][places[0]])
        if len(places) != 1 or index is None or index.dim() != 1 or index.dtype in (torch.bool, torch.uint8):
            return None
        dim = places[0]
    else:
        dim = given["dim"] % before.dim()
    if dim == before.dim() - 1:
        return None
    rows, of = _hint(_count(node, dim)), _hint(before.shape[dim])
    return dim if rows is not None and of is not None and rows * _FEWEST_ROWS <= of else None


def _count(selection: fx.Node, dim: int) -> int | torch.SymInt:
    """Of the rows that are selected."""
    return 1 if selection.target == _aten.select.int else _value(selection).shape[dim]


def _hint(size: int | torch.SymInt) -> int | None:
    """The example's size; None where it depends on values."""
    hint: int | None = size if isinstance(size, int) else size.node.hint
    return hint


def _region(selection: fx.Node, dim: int, aliases: Aliases) -> dict[fx.Node, int]:
    """The nodes that only the selection needs, in reverse order, with the dimension of each along which rows lie."""
    source = selection.args[0]
    assert isinstance(source, fx.Node)
    # Of the sizes of a view one can be left open, which is that of the rows if it varies.
    varying = 1 if isinstance(_count(selection, dim), int) else 0
    wanted: dict[fx.Node, set[int]] = {source: {dim}}
    region: dict[fx.Node, int] = {}
    for node in _backwards(source):
        dims = wanted.get(node, set())
        if len(dims) != 1 or not all(user in region or user is selection or is_check(user) for user in node.users):
            continue
        (own,) = dims
        operands = _operands(node, own)
        if operands is None or any(aliases.is_written(each) for each in (node, *dict(operands))):
            continue
        if _is_view(node) and [isinstance(size, int) for size in _other_sizes(node, own)].count(False) > varying:
            continue
        region[node] = own
        for operand, place in operands:
            wanted.setdefault(operand, set()).add(place)
    # Rows cannot be selected of several tensors at once.
    return {node: own for node, own in region.items() if node.target is not operator.getitem or node.args[0] in region}


def _backwards(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and those before it in the graph."""
    while node.op != "root":
        yield node
        node = node.prev


def _operands(node: fx.Node, dim: int) -> _Operands:
    if node.op != "call_function" or is_mutating(node):
        return None
    if node.target is operator.getitem:
        return [(node.args[0], dim)] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for applies, operands in _RULES:
        if applies(node):
            return operands(node, dim)
    return None


def _of_linear(node: fx.Node, dim: int) -> _Operands:
    given, value = arguments_of(node), value_of(node)
    if value is None or dim == value.dim() - 1 or given.get("input_range") == "tensor":
        return None
    operands = [given[name] for name in _LINEARS[node.target]]  # type: ignore[index]
    # A bias of addmm may have rows.
    if node.target == _aten.addmm.default and _value(given["self"]).dim() > 1:
        return None
    return [(operand, dim) for operand in operands if operand is not None]


def _is_pointwise(node: fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    tags = node.target.tags
    return node.target in _COPIES or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def _of_pointwise(node: fx.Node, dim: int) -> _Operands:
    value = value_of(node)
    return None if value is None else _aligned(node.all_input_nodes, value.shape, dim)


def _aligned(inputs: list[fx.Node], shape: Sequence[Any], dim: int) -> _Operands:
    """Of tensors that are broadcast to a shape, those that have rows along ``dim``."""
    operands = []
    for operand in inputs:
        given = value_of(operand)
        if given is None:
            return None
        place = dim - (len(shape) - given.dim())
        if place < 0 or (statically_known_true(given.shape[place] == 1) and not _same(shape[dim], 1)):
            continue
        if not _same(given.shape[place], shape[dim]):
            return None
        operands.append((operand, place))
    return operands


def _of_norm(node: fx.Node, dim: int) -> _Operands:
    given = arguments_of(node)
    x = given["input"]
    return [(x, dim)] if dim < _value(x).dim() - len(given["normalized_shape"]) else None


def _of_dimensions(node: fx.Node, dim: int) -> _Operands:
    """Where the operator works along other dimensions than ``dim``, and none before it disappears."""
    given = arguments_of(node)
    along, rank = given.get("dim"), _value(given["self"]).dim()
    dims = [each % rank for each in ([along] if isinstance(along, int) else along or [])]
    keeps = pytree.tree_leaves(node.meta["val"])[0].dim() == rank
    good = dims and all(each != dim if keeps else each > dim for each in dims)
    return [(given["self"], dim)] if good else None


def _of_concatenation(node: fx.Node, dim: int) -> _Operands:
    given = arguments_of(node)
    rank = _value(node).dim()
    parts = given["tensors"]
    return [(part, dim) for part in parts] if given["dim"] % rank != dim else None


def _is_view(node: fx.Node) -> bool:
    return operator_name(node) in SHAPE_ONLY


def _other_sizes(node: fx.Node, dim: int) -> list[Any]:
    return [size for i, size in enumerate(_value(node).shape) if i != dim]


def _of_view(node: fx.Node, dim: int) -> _Operands:
    """Where sizes of one, and dimensions behind the rows, come and go."""
    source = node.args[0]
    before, after = value_of(source), value_of(node)
    if before is None or after is None or not isinstance(source, fx.Node):
        return None
    for place in range(before.dim()):
        if _same(before.shape[place], after.shape[dim]) and _are_alike(before.shape[:place], after.shape[:dim]):
            return [(source, place)]
    return None


def _are_alike(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether sizes are the same but for those that are one."""
    a, b = ([size for size in sizes if not _same(size, 1)] for sizes in (first, second))
    return len(a) == len(b) and all(map(_same, a, b))


def _of_transpose(node: fx.Node, dim: int) -> _Operands:
    given, rank = arguments_of(node), _value(node).dim()
    if node.target == _aten.permute.default:
        return [(given["self"], given["dims"][dim] % rank)]
    swapped = {given["dim0"] % rank: given["dim1"] % rank, given["dim1"] % rank: given["dim0"] % rank}
    return [(given["self"], swapped.get(dim, dim))]


def _of_attention(node: fx.Node, dim: int) -> _Operands:
    """Queries, and the rows of a mask."""
    given, shape = arguments_of(node), _value(node).shape
    query, key, value, mask = list(given.values())[:4]
    causal = given.get("is_causal", given.get("causal"))
    if dim != len(shape) - 2 or causal or given.get("dropout_p") or query in (key, value):
        return None
    of_mask = [] if mask is None else _aligned([mask], [*shape[:-1], _value(mask).shape[-1]], dim)
    return None if of_mask is None else [(query, dim), *of_mask]


_RULES: tuple[tuple[Callable[[fx.Node], bool], Callable[[fx.Node, int], _Operands]], ...] = (
    (lambda node: node.target in _LINEARS, _of_linear),
    (lambda node: node.target in _NORMS, _of_norm),
    (lambda node: node.target == _aten.cat.default, _of_concatenation),
    (lambda node: node.target in _TRANSPOSES, _of_transpose),
    (lambda node: node.target in _ATTENTIONS, _of_attention),
    (_is_pointwise, _of_pointwise),
    (_is_view, _of_view),
    (lambda node: operator_name(node) in _ALONG, _of_dimensions),
)


def _replace(graph: fx.Graph, selection: fx.Node, dim: int, region: dict[fx.Node, int]) -> None:
    """The selection by one of what the region reads, and a copy of the region for its rows."""
    made: dict[tuple[fx.Node, int], fx.Node] = {}

    def selected(source: fx.Node, place: int) -> fx.Node:
        if source in region:
            return made[source, place]
        if (source, place) not in made:
            made[source, place] = _select(graph, selection, source, place)
        return made[source, place]

    with graph.inserting_before(selection):
        for node in reversed(region):
            own = region[node]
            operands = _operands(node, own)
            assert operands is not None
            rows = {operand: selected(operand, place) for operand, place in operands}
            args, kwargs = fx.map_arg((node.args, node.kwargs), partial(_in_place_of, rows))
            if _is_view(node):
                sizes = [size if isinstance(size, int) else -1 for size in _other_sizes(node, own)]
                count = _value(args[0]).shape[operands[0][1]]
                sizes.insert(own, count if isinstance(count, int) else -1)
                made[node, own] = add_call(graph, node, _aten.reshape.default, (args[0], sizes))
            else:
                made[node, own] = add_call(graph, node, node.target, args, kwargs)
        source = selection.args[0]
        assert isinstance(source, fx.Node)
        result = made[source, dim]
        if selection.target == _aten.select.int:
            result = add_call(graph, selection, _aten.squeeze.dim, (result, dim))
    selection.replace_all_uses_with(result)
    graph.erase_node(selection)
    for node in region:
        for check in list(node.users):
            graph.erase_node(check)
        graph.erase_node(node)


def _in_place_of(rows: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return rows.get(node, node)


def _select(graph: fx.Graph, selection: fx.Node, source: fx.Node, dim: int) -> fx.Node:
    """What the selection would take of another tensor, with as many dimensions as that has."""
    given = arguments_of(selection)
    if selection.target == _aten.select.int:
        row = add_call(graph, selection, _aten.select.int, (source, dim, given["index"]))
        return add_call(graph, selection, _aten.unsqueeze.default, (row, dim))
    if selection.target == _aten.slice.Tensor:
        args = (source, dim, given["start"], given["end"], given["step"])
        return add_call(graph, selection, _aten.slice.Tensor, args)
    if selection.target == _aten.index_select.default:
        return add_call(graph, selection, _aten.index_select.default, (source, dim, given["index"]))
    index = next(index for index in given["indices"] if index is not None)
    return add_call(graph, selection, _aten.index.Tensor, (source, [*([None] * dim), index]))


def _value(node: Any) -> torch.Tensor:
    value = value_of(node)
    assert value is not None
    return value


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)
