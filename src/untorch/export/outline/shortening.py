"""A model of many equal layers is compiled up to its lowering as one of few, and gets the others back there.

AOTAutograd retraces a graph twice, and the passes behind it look at each node: of 36 decoder layers that is most of the
time, and 36 times the same. ``shorten`` leaves all but ``KEPT`` of the layers out of a graph; ``lengthen`` finds the
layers in what became of it, and repeats one of them with the weights and numbers of those that were left out.

What differs between layers is known by its sequence: the names of ``layers.0.norm.weight``, ``layers.1.norm.weight``
and so on, parts of constants (``offsets[3, 1]``), and integers that operators of our own take. A layer is repeated only
where everything in it that differs is part of such a sequence; nothing is guessed, and a graph that is not understood
stays as it is.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import fx

from untorch.export.outline.equal import MOST_NODES, candidates
from untorch.export.outline.look import form, look, own_numbers

__all__ = ["KEPT", "LengthenError", "Shortened", "lengthen", "shorten"]

# The first, which may differ at its beginning, two that are compared with each other, and the last.
KEPT = 4
_FEWEST_LEFT_OUT = 2
_FEWEST_NODES = 4  # in a layer
_MODULES = "nn_module_stack"


class LengthenError(Exception):
    """The layers were not found in what became of a shortened graph: it has to be compiled as a whole."""


@dataclass(frozen=True)
class Shortened:
    """The graph without some layers, and what differs between all of them.

    parts, numbers: a sequence for each part of a constant and for each integer, with an entry for each layer.
    modules: of each layer, where the model's code has its nodes (``nn_module_stack``), by their places in it; places:
    the nodes' places by their names.
    """

    graph: fx.Graph
    left_out: int
    parts: list[tuple[Hashable, ...]]
    numbers: list[tuple[int, ...]]
    modules: list[list[Any]]
    places: dict[str, tuple[int, int]]


@dataclass
class _Period:
    """Nodes that are followed by equal ones; ``before`` are those of the period in front of it.

    forms: the arguments of each node: a node of this period or the same place in the one before, a part of a constant
    by its place in ``parts``, or a node that all periods share.
    """

    nodes: list[fx.Node]
    before: list[fx.Node]
    forms: list[Hashable] = field(default_factory=list)
    parts: list[Hashable] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        here = {node: index for index, node in enumerate(self.nodes)}
        before = {node: index for index, node in enumerate(self.before)}
        parts: dict[Hashable, int] = {}

        def describe(operand: fx.Node) -> Hashable:
            if operand in here:
                return "here", here[operand]
            if operand in before:
                return "before", before[operand]
            if (part := _part(operand)) is not None:
                return "part", parts.setdefault(part, len(parts))
            return "shared", id(operand)

        for node in self.nodes:
            self.forms.append((node.target, form(node, describe)))
            self.numbers += [node.args[index] for index in own_numbers(node)]  # type: ignore[misc]
        self.parts = list(parts)

    def is_read_only_by(self, after: _Period) -> bool:
        allowed = {*self.nodes, *after.nodes}
        return all(user in allowed for node in self.nodes for user in node.users)


class _Sequences:
    """What differs between layers: which of it a layer of the shortened graph has, and what another one would have."""

    def __init__(self, shortened: Shortened) -> None:
        self.left_out, self._parts, self._numbers = shortened.left_out, shortened.parts, shortened.numbers
        self._places = {
            part: (index, number)
            for index, sequence in enumerate(shortened.parts)
            for number, part in enumerate(self._kept(sequence))
        }

    def _kept(self, sequence: Sequence[Any]) -> list[Any]:
        return [*sequence[: KEPT - 1], sequence[-1]]

    def reach_the_last_layer(self, period: _Period) -> bool:
        return any(self._places.get(part, (0, 0))[1] == KEPT - 1 for part in period.parts)

    def used_by(self, nodes: Iterable[fx.Node]) -> set[int]:
        parts = (_part(operand) for node in nodes for operand in node.all_input_nodes)
        return {self._places[part][0] for part in parts if part in self._places}

    def follow(self, template: _Period, after: _Period) -> bool:
        """Whether what differs between the two is what differs between a layer and the next one."""
        for part, next_part in zip(template.parts, after.parts, strict=True):
            sequence, number = self._places.get(part, (None, 0))
            if self._places.get(next_part, (None, 1)) != (sequence, number + 1):
                return False
            if sequence is None and part != next_part:
                return False
        return all(
            self._numbers_behind(*pair) is not None for pair in zip(template.numbers, after.numbers, strict=True)
        )

    def part(self, part: Hashable, layers: int) -> Hashable:
        """That of so many layers later."""
        if part not in self._places:
            return part
        sequence, number = self._places[part]
        return self._parts[sequence][number + layers]

    def number(self, number: int, after: int, layers: int) -> int:
        """That of so many layers later. ``after`` follows ``number`` in the shortened graph."""
        numbers = self._numbers_behind(number, after)
        assert numbers is not None
        return numbers[layers]

    def _numbers_behind(self, number: int, after: int) -> Sequence[int] | None:
        """The number and those of the layers that follow; None if it cannot be told which they are."""
        length = self.left_out + 2
        found = {
            sequence[index : index + length]
            for sequence in self._numbers
            for index, pair in enumerate(pairwise(self._kept(sequence)))
            if pair == (number, after)
        }
        if not found and number == after:
            return (number,) * length
        return found.pop() if len(found) == 1 else None


def shorten(graph: fx.Graph) -> Shortened | None:
    """A copy of the graph without layers that equal those before them; None if it has none."""
    best: list[_Period] = []
    saved = 0
    for repetition in _repetitions(graph):
        length = len(repetition[0])
        if (len(repetition) - KEPT) * length <= saved:
            continue
        chain = _longest_chain(_periods(repetition))
        if len(chain) - KEPT >= _FEWEST_LEFT_OUT and (len(chain) - KEPT) * length > saved:
            best, saved = chain, (len(chain) - KEPT) * length
    if not best:
        return None
    parts = _differing(period.parts for period in best)
    if not parts or max(Counter(part for sequence in parts for part in sequence).values()) > 1:
        return None  # no layers with weights of their own, or one that several have
    differing = {part for sequence in parts for part in sequence}
    if any(_is_folded(node, differing) for period in best for node in period.nodes):
        return None
    return Shortened(
        _without(graph, best),
        len(best) - KEPT,
        parts,
        _differing(period.numbers for period in best),
        [[node.meta.get(_MODULES) for node in period.nodes] for period in best],
        {node.name: (number, place) for number, period in enumerate(best) for place, node in enumerate(period.nodes)},
    )


def lengthen(module: fx.GraphModule, shortened: Shortened) -> None:
    """Puts the layers back that were left out, in place, into what became of the shortened graph.

    Raises LengthenError if it does not find where.
    """
    sequences = _Sequences(shortened)
    differing = sequences.used_by(module.graph.nodes)
    for repetition in _repetitions(module.graph):
        periods = _periods(repetition)
        last = next((index for index, period in enumerate(periods) if sequences.reach_the_last_layer(period)), 0)
        if last < 2:  # the first one's operands come from elsewhere
            continue
        template, after = periods[last - 1], periods[last]
        if (
            template.forms == after.forms
            and template.is_read_only_by(after)
            and sequences.follow(template, after)
            and sequences.used_by(template.nodes) == differing
        ):
            _Repeater(module, template, after, sequences, shortened).repeat()
            return
    raise LengthenError("the layers that were left out were not found again")


def _body(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and _part(node) is None]


def _part(node: fx.Node) -> tuple[Any, ...] | None:
    """A constant by its name, or ``constant[1, 2]``, which each layer may have of its own; None for other nodes."""
    if node.op == "get_attr":
        return (node.target,) if isinstance(node.meta.get("val"), torch.Tensor) else None
    if node.target != torch.ops.aten.select.int or not isinstance(node.args[0], fx.Node):
        return None
    whole, place = _part(node.args[0]), tuple(node.args[1:])
    return (*whole, place) if whole is not None and all(isinstance(value, int) for value in place) else None


def _is_folded(node: fx.Node, parts: set[Any]) -> bool:
    """Whether Inductor may compute with the values of some of the ``parts``: of single elements it does.

    The values of layers that are kept tell nothing about others.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return any(operand.meta["val"].numel() == 1 for operand in node.all_input_nodes if _part(operand) in parts)


def _repetitions(graph: fx.Graph) -> Iterator[list[list[fx.Node]]]:
    """Sequences of nodes that follow each other and look equal, those first that have most nodes."""
    body = _body(graph)
    if len(body) > MOST_NODES:
        return
    numbers: dict[Hashable, int] = {}
    tokens = np.array([numbers.setdefault(look(node), len(numbers)) for node in body], np.int32)
    for start, length in candidates(tokens, _FEWEST_NODES):
        first, end = tokens[start : start + length], start + length
        while np.array_equal(tokens[end : end + length], first):
            end += length
        yield [body[begin : begin + length] for begin in range(start, end, length)]


def _periods(repetition: list[list[fx.Node]]) -> list[_Period]:
    return [_Period(nodes, before) for before, nodes in pairwise([[], *repetition])]


def _longest_chain(periods: list[_Period]) -> list[_Period]:
    """Those that are connected alike, and of which nothing but the next one reads anything."""
    chains: list[list[_Period]] = [[]]
    for period in periods:
        chain = chains[-1]
        if not chain or (chain[-1].forms == period.forms and chain[-1].is_read_only_by(period)):
            chain.append(period)
        else:
            chains.append([period])
    return max(chains, key=len)


def _differing(layers: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The sequences of what layers have at the same place, without those that are the same everywhere."""
    sequences = dict.fromkeys(zip(*layers, strict=True))
    return [sequence for sequence in sequences if len(set(sequence)) > 1]


def _without(graph: fx.Graph, layers: list[_Period]) -> fx.Graph:
    """A copy of the graph in which the last layer follows those that are kept in front."""
    shorter = copy.deepcopy(graph)
    copies = dict(zip(graph.nodes, shorter.nodes, strict=True))
    for left_out, kept in zip(layers[-2].nodes, layers[KEPT - 2].nodes, strict=True):
        copies[left_out].replace_all_uses_with(
            copies[kept], delete_user_cb=lambda user, last={copies[node] for node in layers[-1].nodes}: user in last
        )
    for layer in reversed(layers[KEPT - 1 : -1]):
        for node in reversed(layer.nodes):
            shorter.erase_node(copies[node])
    _drop_unused_parts(shorter)
    return shorter


def _drop_unused_parts(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and _part(node) is not None:
            graph.erase_node(node)


class _Repeater:
    """Repeats ``template``, and puts the last of its copies in the place of ``after``, which follows it."""

    def __init__(
        self, module: fx.GraphModule, template: _Period, after: _Period, sequences: _Sequences, shortened: Shortened
    ) -> None:
        self._module, self._template, self._after = module, template, after
        self._sequences, self._shortened = sequences, shortened
        self._made: dict[Hashable, fx.Node] = {}

    def repeat(self) -> None:
        """Raises LengthenError if the module has lost a constant, and changes nothing then."""
        graph, layers = self._module.graph, range(1, self._shortened.left_out + 2)
        for part in self._template.parts:
            for layer in layers:
                self._check(self._sequences.part(part, layer))
        self._take_parts()
        copies = self._template.nodes
        with graph.inserting_before(self._after.nodes[0]):
            for layer in layers:
                copies = self._copy(copies, layer)
        for node, made in zip(self._after.nodes, copies, strict=True):
            node.replace_all_uses_with(made)
        for node in reversed(self._after.nodes):
            graph.erase_node(node)
        _drop_unused_parts(graph)
        self._sort_constants()
        graph.lint()
        self._module.recompile()

    def _take_parts(self) -> None:
        """Parts of constants that are there already are used again: they move in front of what is made."""
        begun, first = False, self._after.nodes[0]
        for node in list(self._module.graph.nodes):
            begun = begun or node is first
            if (part := _part(node)) is not None:
                self._made.setdefault(part, node)
                if begun:
                    first.prepend(node)

    def _sort_constants(self) -> None:
        """Constants have the order that they have in the module, as in a graph that was not shortened."""
        module, graph = self._module, self._module.graph
        names = [*(name for name, _ in module.named_parameters()), *(name for name, _ in module.named_buffers())]
        order = {name: index for index, name in enumerate(names)}
        constants = [node for node in graph.nodes if node.op == "get_attr" and node.target in order]
        first = next(node for node in graph.nodes if node.op != "get_attr")
        for node in sorted(constants, key=lambda node: order[node.target]):
            first.prepend(node)

    def _check(self, part: Any) -> None:
        try:
            attrgetter(part[0])(self._module)
        except AttributeError as error:
            raise LengthenError(f"the constant {part[0]} is no longer there") from error

    def _copy(self, before: list[fx.Node], layer: int) -> list[fx.Node]:
        """The layer that is so many layers after the template; it follows ``before``."""
        places = {node: index for index, node in enumerate(self._template.before)}
        copies: dict[fx.Node, fx.Node] = {}

        def operand(node: fx.Node) -> fx.Node:
            if node in places:
                return before[places[node]]
            return copies[node] if node in copies else self._constant(node, layer)

        numbers = zip(self._template.numbers, self._after.numbers, strict=True)
        for node in self._template.nodes:
            made = copies[node] = self._module.graph.node_copy(node, operand)
            arguments = list(made.args)
            for index in own_numbers(node):
                arguments[index] = self._sequences.number(*next(numbers), layer)
            made.args = tuple(arguments)
            self._name_module(made, layer)
        return list(copies.values())

    def _constant(self, node: fx.Node, layer: int) -> fx.Node:
        """What that layer has in the place of a constant; any other node is the same for all."""
        if (part := _part(node)) is None:
            return node
        wanted: Any = self._sequences.part(part, layer)
        return node if wanted == part else self._make(wanted, node)

    def _make(self, part: tuple[Any, ...], like: Any) -> fx.Node:
        if part not in self._made:
            graph = self._module.graph
            if len(part) == 1:
                made = graph.get_attr(part[0])
                made.meta = copy.copy(like.meta)
            else:
                whole = self._make(part[:-1], like.args[0])
                made = graph.call_function(like.target, (whole, *part[-1]))
                made.meta = {**like.meta, "val": like.target(whole.meta["val"], *part[-1])}
            self._made[part] = made
        return self._made[part]

    def _name_module(self, node: fx.Node, layer: int) -> None:
        """Reports say which module of the model a kernel is of."""
        for source in node.meta.get("from_node", ()):
            if source.name in self._shortened.places:
                number, place = self._shortened.places[source.name]
                modules = self._shortened.modules[min(number + layer, len(self._shortened.modules) - 1)]
                if modules[place] is not None:
                    node.meta[_MODULES] = modules[place]
                return
