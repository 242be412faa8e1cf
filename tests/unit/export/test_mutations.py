"""Tests of the alias analysis: what shares memory, and which attributes and inputs are written, through what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from untorch.export.mutations import Aliases, Mutations, find_mutations


class Holds(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def unlift(function: Callable[[Any, torch.Tensor], Any]) -> fx.GraphModule:
    with torch.no_grad():
        module = torch.export.export(Holds(function), (torch.randn(6),)).module()
    assert isinstance(module, fx.GraphModule)
    return module


@pytest.mark.parametrize(
    ("function", "attributes", "inputs"),
    [
        (lambda m, x: x + m.table, set(), set()),
        (lambda m, x: m.table.add_(x).sum(), {"table"}, set()),
        (lambda m, x: x.add_(m.table).sum(), set(), {"x"}),
        (lambda m, x: (m.table[1:3].view(2, 1).mul_(2), x * 2)[1], {"table"}, set()),
        (lambda m, x: (m.table.split(2)[1].zero_(), x * 2)[1], {"table"}, set()),
        (lambda m, x: (m.table.clone().zero_(), x * 2)[1], set(), set()),
        (lambda m, x: (torch.atleast_2d(x).zero_(), x * 2)[1], set(), {"x"}),
        (lambda m, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), set(), set()),
    ],
)
def test_writes_reach_their_source(
    function: Callable[[Any, torch.Tensor], Any], attributes: set[str], inputs: set[str]
) -> None:
    assert find_mutations(unlift(function).graph) == Mutations(frozenset(attributes), frozenset(inputs))


def test_groups() -> None:
    graph = unlift(lambda m, x: (m.table[1:].view(5) + x[0], x.clone())).graph
    aliases = Aliases(graph)
    nodes = {node.name: node for node in graph.nodes}
    assert {node.name for node in aliases.group(nodes["table"])} == {"table", "slice_1", "view"}
    assert {node.name for node in aliases.group(nodes["x"])} == {"x", "select"}
    assert not any(aliases.is_written(node) for node in graph.nodes)
    aliases.join(nodes["select"], nodes["view"])
    assert nodes["x"] in aliases.group(nodes["table"])


def test_results_that_are_no_views_are_not_written() -> None:
    """PyTorch requires a custom operator's result to be memory of its own, whatever it writes."""

    @torch.library.custom_op("untorch_tests::sum_and_clear", mutates_args=("x",))
    def sum_and_clear(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @sum_and_clear.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(())

    graph = unlift(lambda m, x: (torch.ops.untorch_tests.sum_and_clear(m.table), m.table.mul_(2)[0])).graph
    aliases = Aliases(graph)
    nodes = {node.name: node for node in graph.nodes}
    assert aliases.group(nodes["sum_and_clear"]) == [nodes["sum_and_clear"]]
    assert not aliases.is_written(nodes["sum_and_clear"])
    assert aliases.is_written(nodes["table"])
    assert aliases.is_written(nodes["mul_"])
