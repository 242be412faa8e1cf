"""Sizes of random values that parts of a graph are evaluated with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.export.passes.probes import evaluate, probe_size


class Model(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = torch.cat([x, x]).reshape(x.shape[0], 2, 4)
        return pairs.flatten(), y + 1


@pytest.fixture(scope="module")
def nodes() -> dict[str, torch.fx.Node]:
    program = torch.export.export(
        Model(), (torch.randn(2048, 4), torch.randn(3)), dynamic_shapes=({0: Dim("n")}, {0: Dim("m")})
    )
    return {node.name: node for node in program.graph.nodes}


def test_sizes_that_vary_are_small(nodes: dict[str, torch.fx.Node]) -> None:
    """Consistently, where one is computed from another; an example that is smaller stays, and so do static sizes."""
    sizes = {name: tuple(map(probe_size, nodes[name].meta["val"].shape)) for name in ("x", "y", "reshape", "flatten")}
    assert sizes == {"x": (6, 4), "y": (3,), "reshape": (6, 2, 4), "flatten": (48,)}
    assert probe_size(7) == 7


def test_parts_are_evaluated_with_few_values(nodes: dict[str, torch.fx.Node]) -> None:
    between = [nodes[name] for name in ("cat", "reshape", "flatten")]
    x = torch.randn(6, 4)
    found = evaluate(between, {nodes["x"]: x})
    assert torch.equal(found[nodes["flatten"]], torch.cat([x, x]).flatten())
