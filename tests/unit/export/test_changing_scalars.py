"""A buffer of one element that the model writes into is state, not a constant."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import untorch
from untorch.export import export


class Steps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x + self.steps


@pytest.mark.filterwarnings("ignore")
def test_a_step_counter_counts(tmp_path: Path) -> None:
    export(Steps(), (torch.zeros(2),), tmp_path / "steps.pt2", progress=False)
    with untorch.load(tmp_path / "steps.pt2") as program:
        x = numpy.zeros(2, numpy.float32)
        assert [program.forward(x).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


def test_torch_still_folds_them() -> None:
    """Fails when the patch in torch_patches.py is no longer needed."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

    graph = torch.fx.Graph()
    steps = graph.get_attr("steps")
    steps.meta["val"] = torch.zeros(())
    more = graph.call_function(torch.ops.aten.add.Tensor, (steps, 1))
    more.meta["val"] = torch.zeros(())
    written = graph.call_function(torch.ops.aten.copy_.default, (steps, more))
    written.meta["val"] = torch.zeros(())
    graph.output((more,))
    folder = UniformValueConstantFolder(torch.fx.GraphModule(Root(), graph))
    folder.run()
    assert more in folder.node_replacements


class Before(torch.nn.Module):
    """Gives a buffer as it was before the call changed it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.count.clone()
        self.count += x
        return before


@pytest.mark.parametrize("shape", [(), (3,), (40, 40)])
@pytest.mark.slow
def test_a_clone_has_the_value_of_before(tmp_path: Path, shape: tuple[int, ...]) -> None:
    export(Before(shape), (torch.ones(shape),), tmp_path / "before.pt2", progress=False)
    with untorch.load(tmp_path / "before.pt2") as program:
        x = numpy.ones(shape, numpy.float32)
        assert [numpy.unique(program(x)).tolist() for _ in range(3)] == [[0], [1], [2]]


def test_torch_still_drops_clones() -> None:
    """Fails when the patch in torch_patches.py is no longer needed."""
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    graph = torch.fx.Graph()
    count = graph.get_attr("count")
    before = graph.call_function(torch.ops.aten.clone.default, (count,))
    more = graph.call_function(torch.ops.aten.add.Tensor, (count, 1))
    written = graph.call_function(torch.ops.aten.copy_.default, (count, more))
    with torch._subclasses.FakeTensorMode():
        for node in (count, before, more, written):
            node.meta["val"] = torch.zeros(3)
    graph.output((before, written))
    remove_noop_ops(graph)
    assert before not in graph.nodes
