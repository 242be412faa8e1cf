"""Finds equal layers: sequences of nodes that occur several times, with other operands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from untorch.export.outline.gather import find_gathered
from untorch.export.outline.look import form, kind, look, own_numbers
from untorch.export.outline.nodes import is_convolution, is_heavy, is_number, is_view, written_arguments

__all__ = ["FEWEST_CALLS", "MOST_NODES", "Body", "Layer", "candidates", "find_layers"]

# Two calls save one layer, and cost a function and the fusion of what lies at its ends.
FEWEST_CALLS = 3
# What a layer has to have: calls of short functions save nothing, and elementwise operators between GEMMs are fused.
_FEWEST_NODES, _FEWEST_HEAVY = 12, 4
# Sequences of equal lengths that are looked at closely.
_CANDIDATES = 24
# Larger graphs would take long to search, and memory.
MOST_NODES = 60_000
# What a cut costs, in tensors that are passed on: where Inductor would fuse, and where none is possible.
_LOST_FUSION, _PARTED = 4, 1000


@dataclass
class Body:
    """The nodes that layers are made of, in order, and a number for each: equal for nodes that look equal."""

    nodes: list[fx.Node]
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    position: dict[fx.Node, int]

    @classmethod
    def of(cls, graph: fx.Graph, taken: set[fx.Node]) -> Body:
        """taken: calls of layers, and what unpacks their results: in no layer."""
        outside = find_gathered(graph)
        nodes = [node for node in graph.nodes if node.op == "call_function" and node not in outside]
        numbers: dict[Hashable, int] = {}
        tokens = np.empty(len(nodes), np.int32)
        for index, node in enumerate(nodes):
            key: Hashable = ("alone", index) if node in taken else look(node)
            tokens[index] = numbers.setdefault(key, len(numbers))
        return cls(nodes, tokens, {node: index for index, node in enumerate(nodes)})


@dataclass
class Layer:
    """Nodes that become a call: what they read from outside in the order of first use, and what others read of them."""

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: list[fx.Node]
    numbers: list[tuple[int, int, int]]  # a node's place, the argument's, and the value
    form: Hashable
    written: frozenset[int]


def find_layers(body: Body) -> list[Layer] | None:
    """The equal sequences that save most; None if nothing is worth a function."""
    count = len(body.nodes)
    if count < FEWEST_CALLS * _FEWEST_NODES or count > MOST_NODES:
        return None
    best: list[Layer] | None = None
    saved = 0
    for start, length in candidates(body.tokens):
        most = (len(_occurrences(body.tokens, start, length)) - 1) * length
        if most <= saved:
            continue
        layers = _layers(body, _best_cut(body, start, length), length)
        if layers is not None and (len(layers) - 1) * length > saved:
            best, saved = layers, (len(layers) - 1) * length
    return best


def candidates(tokens: np.ndarray[Any, Any], fewest: int = _FEWEST_NODES) -> Iterable[tuple[int, int]]:
    """Where a sequence begins that is followed by an equal one, and its length: those first that save most.

    fewest: nodes in it.
    """
    found: list[tuple[int, int, int]] = []
    for period in range(fewest, len(tokens) // 2 + 1):
        equal = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        begins, ends = edges[::2], edges[1::2]
        long = ends - begins >= period
        if long.any():
            begins, ends = begins[long], ends[long]
            run = int(np.argmax(ends - begins))
            # A run of r equal tokens has r + 1 whole periods of them at most.
            found.append((int((((ends - begins) // period) * period).sum()), int(begins[run]), period))
    found.sort(key=lambda entry: (-entry[0], entry[2]))
    for _, start, period in found[:_CANDIDATES]:
        yield start, period


def _occurrences(tokens: np.ndarray[Any, Any], start: int, length: int) -> list[int]:
    """Where the sequence occurs, without overlaps."""
    text, pattern = tokens.tobytes(), tokens[start : start + length].tobytes()
    found, place = [], text.find(pattern)
    while place >= 0:
        if place % tokens.itemsize:
            place = text.find(pattern, place + 1)
            continue
        found.append(place // tokens.itemsize)
        place = text.find(pattern, place + len(pattern))
    return found


def _best_cut(body: Body, start: int, length: int) -> int:
    """Where the sequence begins best, of its ``length`` rotations.

    What Inductor would fuse should not be parted, and few and small tensors should be passed on: after the GEMM that
    ends a layer, before the sum that begins the next.
    """
    # In the second of two: what lies before the first may differ.
    costs = [(_cost_of_cut(body, place, length), place) for place in range(start + length, start + 2 * length)]
    return min(costs)[1] - length


def _cost_of_cut(body: Body, place: int, length: int) -> tuple[int, int]:
    passed, size = 0, 0
    for node in body.nodes[place - length : place]:
        later = [user for user in node.users if body.position.get(user, -1) >= place]
        if not later:
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            passed += _PARTED  # an operator from what unpacks its results
            continue
        passed += 1
        size += _elements(value)
        base = node
        while is_view(base) or base.target is getitem:
            base = base.all_input_nodes[0]
        if not is_heavy(base) and base.op == "call_function" and len(later) == len(node.users):
            passed += _LOST_FUSION
    return passed, size


def _elements(value: torch.Tensor) -> int:
    count = 1
    for extent in value.shape:
        hint = extent.node.hint if isinstance(extent, torch.SymInt) else extent
        count *= hint if isinstance(hint, int) else 1
    return count


def _layers(body: Body, start: int, length: int) -> list[Layer] | None:
    """The occurrences whose nodes are connected alike, if there are enough."""
    by_form: dict[Hashable, list[Layer]] = defaultdict(list)
    for place in _occurrences(body.tokens, start, length):
        layer = _layer(body.nodes[place : place + length])
        if layer is not None:
            by_form[layer.form].append(layer)
    if not by_form:
        return None
    layers = max(by_form.values(), key=len)
    return layers if len(layers) >= FEWEST_CALLS and _is_worth_it(body, layers) else None


def _is_worth_it(body: Body, layers: list[Layer]) -> bool:
    """Whether these are layers, and not the steps of a loop, which have one weight, nor blocks between convolutions.

    Steps are short, and many are as many borders. In networks of convolutions Inductor keeps one layout throughout.
    """
    if sum(map(is_heavy, layers[0].nodes)) < _FEWEST_HEAVY:
        return False
    weights = [{operand.target for operand in layer.operands if operand.op == "get_attr"} for layer in layers]
    if weights[0] == weights[1]:
        return False
    return sum(map(is_convolution, body.nodes)) < len(layers)


def _layer(nodes: Sequence[fx.Node]) -> Layer | None:
    """None if these cannot be a function."""
    place = {node: index for index, node in enumerate(nodes)}
    operands: dict[fx.Node, int] = {}
    arguments: list[Hashable] = []

    def name(operand: fx.Node) -> Hashable:
        if operand in place:
            return ("node", place[operand])
        return ("operand", operands.setdefault(operand, len(operands)))

    written: set[int] = set()
    for node in nodes:
        if not _can_be_inside(node):
            return None
        arguments.append(form(node, name))
        for target in written_arguments(node):
            base = target
            while base in place and is_view(base):
                base = base.all_input_nodes[0]
            if base not in place:
                written.add(operands[base])
    if not all(_can_be_operand(operand) for operand in operands):
        return None
    # Views are made again outside: two results in the same memory would be taken for two tensors.
    results = {node for node in nodes if any(user not in place for user in node.users)}
    bases: set[fx.Node] = set()
    for node in results:
        base = node
        while is_view(base):
            base = base.all_input_nodes[0]
            if base not in place:
                return None
        if not isinstance(base.meta.get("val"), torch.Tensor):
            return None
        bases.add(base)
    ordered = sorted(bases, key=place.__getitem__)
    seen_outside = tuple(sorted(place[node] for node in results))
    kinds = tuple(kind(operand) for operand in operands)
    whole = (tuple(arguments), kinds, seen_outside, tuple(place[node] for node in ordered), tuple(sorted(written)))
    numbers: list[tuple[int, int, int]] = [
        (place[node], index, node.args[index])  # type: ignore[misc]
        for node in nodes
        for index in own_numbers(node)
    ]
    return Layer(list(nodes), list(operands), ordered, numbers, whole, frozenset(written))


def _can_be_inside(node: fx.Node) -> bool:
    """Convolutions stay: which layout they take is decided for the whole graph."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
        return False
    return not is_number(node) and not is_convolution(node)


def _can_be_operand(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return not free_unbacked_symbols(value)
    return isinstance(value, torch.Tensor) and not free_unbacked_symbols(value)
