"""Finds what computes a rotary embedding of normalised heads: by evaluating the graph, not by the form of its nodes.

From the heads that attention reads, the graph is followed back to the linear layer they come from. Operators between
may only move elements, add, multiply, and normalise. Its other inputs are tables [tokens, rotary] and a weight [width].
With random values for all of them it has to give what ``rotated`` gives, for large inputs and for small ones, whose
norm ``eps`` decides. Then it is that function, whatever the model's code looks like.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.passes.epilogues import value_of
from untorch.export.passes.linear_calls import read_linear
from untorch.export.passes.probes import evaluate, operator_name, outline, probe_size, small_numbers
from untorch.ops.attention.rope_operator import rotated

__all__ = ["Form", "Rotation", "match_rotation"]

_MOVES = {
    "view", "reshape", "_unsafe_view", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "split",
    "split_with_sizes", "chunk", "unbind", "contiguous", "clone", "alias", "flatten", "unflatten", "expand", "t",
}  # fmt: skip
_COMPUTES = {
    "cat", "stack", "neg", "mul", "add", "sub", "div", "pow", "square", "mean", "sum", "rsqrt", "sqrt", "reciprocal",
    "to", "_to_copy", "type_as", "float", "rms_norm", "sym_size",
}  # fmt: skip
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}
_SCALES = (1.0, 1e-3)  # of the probes: in the second one, eps is as large as the mean of squares


@dataclass(frozen=True)
class Form:
    """Which of the functions it is. swapped: the second of its tables is the cosine."""

    swapped: bool
    interleaved: bool
    eps: float


@dataclass(frozen=True)
class Rotation:
    """heads = rotated(source as [tokens, heads, width], weight, cos, sin, eps, interleaved).

    cos, sin: nodes of tables whose dimensions are 1 but for the tokens and the last one.
    """

    source: fx.Node
    weight: fx.Node | None
    cos: fx.Node
    sin: fx.Node
    eps: float
    interleaved: bool


def match_rotation(heads: fx.Node, known: dict[str, Form | str]) -> Rotation | str:
    """What gives ``heads`` [tokens, heads, width], or why it is no rotation.

    known: the forms of what was evaluated before, by its outline: layers repeat.
    """
    value = value_of(heads)
    assert value is not None
    tokens, count, width = value.shape[0], int(value.shape[1]), int(value.shape[2])
    cone = _cone(heads)
    linears = [node for node in cone if read_linear(node) is not None]
    if len(linears) != 1:
        return f"it does not come from one linear layer, but from {len(linears)}"
    source = _source(linears[0], cone, count, width)
    if source is None:
        return f"the linear layer's result is not [tokens, {count} · {width}]"
    between = _dependent(source, cone)
    leaves: dict[fx.Node, None] = {}
    for node in between:
        name = operator_name(node)
        if name not in _MOVES | _COMPUTES:
            return f"{node.name} is no part of a norm and a rotation"
        leaves |= dict.fromkeys(leaf for leaf in node.all_input_nodes if leaf not in between and leaf is not source)
    weights, tables = [], []
    for leaf in leaves:
        given = leaf.meta.get("val")
        if isinstance(given, int | torch.SymInt):
            continue
        if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dim():
            if _has_sizes(given, width, 1):
                weights.append(leaf)
                continue
            if _is_table(given, tokens, width):
                tables.append(leaf)
                continue
        return f"{leaf.name} is neither a weight of a head nor a table of all tokens"
    if len(tables) != 2 or len(weights) > 1:
        return f"it has {len(tables)} tables and {len(weights)} weights, and a rotation has 2 and at most 1"
    key = f"{outline(between, (source, *weights, *tables))}\n{list(between).index(heads)} {len(weights)}"
    if key not in known:
        known[key] = _identify(heads, source, between, weights[0] if weights else None, tables)
    form = known[key]
    if isinstance(form, str):
        return form
    cos, sin = (_before_views(table, tokens, width) for table in (tables[::-1] if form.swapped else tables))
    return Rotation(source, weights[0] if weights else None, cos, sin, form.eps, form.interleaved)


def _cone(heads: fx.Node) -> dict[fx.Node, None]:
    """What ``heads`` is computed from, to the linear layers, in the graph's order."""
    found, waiting = {heads}, [heads]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                if read_linear(node) is None:
                    waiting.append(node)
    return {node: None for node in heads.graph.nodes if node in found}


def _source(linear: fx.Node, cone: dict[fx.Node, None], count: int, width: int) -> fx.Node | None:
    """The linear layer's result, or the part of it, that has the heads one behind the other."""
    node = linear
    while True:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (
            _has_sizes(value, count * width, None) or (value.dim() > 2 and tuple(value.shape[-2:]) == (count, width))
        ):
            return node
        users = [user for user in node.users if user in cone]
        if len(users) != 1 or (users[0].target is not operator.getitem and operator_name(users[0]) not in _MOVES):
            return None
        node = users[0]


def _dependent(source: fx.Node, cone: dict[fx.Node, None]) -> dict[fx.Node, None]:
    """The nodes of the cone that depend on ``source``, in their order."""
    found: dict[fx.Node, None] = {}
    for node in cone:
        if any(needed is source or needed in found for needed in node.all_input_nodes):
            found[node] = None
    return found


def _has_sizes(value: torch.Tensor, last: int, others: int | None) -> bool:
    """Whether the last size is that, and all others ``others``, if they matter."""
    return bool(value.shape[-1] == last) and (
        others is None or all(isinstance(size, int) and size == others for size in value.shape[:-1])
    )


def _is_table(value: torch.Tensor, tokens: Any, width: int) -> bool:
    rotary, sizes = value.shape[-1], list(value.shape[:-1])
    long = [size for size in sizes if not (isinstance(size, int) and size == 1)]
    if not isinstance(rotary, int) or rotary % 2 or not 0 < rotary <= width or len(long) != 1:
        return False
    return bool(statically_known_true(long[0] == tokens))


def _before_views(table: fx.Node, tokens: Any, width: int) -> fx.Node:
    """What the table is a view of: layers have views of their own."""
    while operator_name(table) in ("unsqueeze", "squeeze", "select", "view", "reshape", "alias"):
        source = table.args[0]
        value, own = value_of(source), table.meta["val"]
        if not isinstance(source, fx.Node) or value is None or not _is_table(value, tokens, width):
            return table
        if value.shape[-1] != own.shape[-1] or value.dtype != own.dtype:
            return table
        table = source
    return table


def _identify(
    heads: fx.Node, source: fx.Node, between: dict[fx.Node, None], weight: fx.Node | None, tables: list[fx.Node]
) -> Form | str:
    """Which of the functions it is."""
    generator = torch.Generator().manual_seed(0)

    def probe(node: fx.Node, scale: float = 1.0) -> torch.Tensor:
        value = node.meta["val"]
        shape = [probe_size(size) for size in value.shape]
        return (scale * torch.randn(shape, generator=generator)).to(value.device, value.dtype)

    count, width = (int(size) for size in heads.meta["val"].shape[1:])
    shared = {node: probe(node) for node in (*tables, *([] if weight is None else [weight]))}
    found = []
    for scale in _SCALES:
        values = shared | {source: probe(source, scale)}
        try:
            found.append((values[source].reshape(-1, count, width), evaluate(between, values)[heads]))
        except Exception as error:
            return f"it cannot be evaluated: {str(error).splitlines()[0]}"
    factors = None if weight is None else shared[weight].reshape(width)
    for (cos, sin), interleaved, eps in itertools.product(
        itertools.permutations(tables), (False, True), small_numbers(between) if weight is not None else [0.0]
    ):
        rows = [shared[table].reshape(-1, shared[table].shape[-1]) for table in (cos, sin)]
        if rows[0].shape == rows[1].shape and all(
            _same(result, rotated(x, factors, rows[0], rows[1], eps, interleaved)) for x, result in found
        ):
            return Form(cos is not tables[0], interleaved, eps)
    return "its values are not those of an RMSNorm of each head and a rotary embedding"


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype or found.dtype not in _TOLERANCE:
        return False
    difference, largest = (float(x.float().abs().max()) for x in (found.float() - expected.float(), expected))
    return math.isfinite(difference) and difference <= _TOLERANCE[found.dtype] * largest
