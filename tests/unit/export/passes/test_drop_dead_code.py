"""Tests of drop_dead_code: before, after, what must stay, and that the module forgets what nothing reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn

from untorch.export.passes.drop_dead_code import drop_dead_code


class Dead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 1024)
        self.register_buffer("count", torch.tensor([0.0, 0.5]))
        self.register_buffer("table", torch.randn(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x).relu()
        a, _ = x.split(2, 1)
        a.sin()
        torch.rand(3)
        self.count.add_(1)
        torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return self.used(x)


def test_before_and_after() -> None:
    model, x = Dead(), torch.randn(3, 4)
    module = unlift(model, x)
    assert {"self.unused.weight", "relu", "split.Tensor", "sin"} <= set(targets(module))
    report = drop_dead_code(module)
    close(module)
    after = targets(module)
    assert [t for t in after if "graph" not in t] == [
        "self.used.weight", "self.used.bias", "self.count", "rand", "add_.Tensor", "sum", "gt.Scalar", "cond", "linear",
    ]  # fmt: skip
    assert not {"relu", "split.Tensor", "sin", "getitem", "self.unused.weight"} & set(after)
    assert {"unused.weight", "unused.bias", "table"} <= set(report.changed)
    assert report.skipped == dict.fromkeys(["cond", "rand"], "its result is not used, but it may do more than compute")
    assert set(module.state_dict()) == {"used.weight", "used.bias", "count"}
    assert_same(module(x), model(x))
    assert model.unused.weight.shape == (1024, 4)


def test_inputs_stay() -> None:
    class Ignores(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            (y * 2).sum()
            return x + 1

    module = unlift(Ignores(), torch.randn(3), torch.randn(3))
    drop_dead_code(module)
    close(module)
    assert targets(module) == ["add.Tensor"]
    assert len([n for n in module.graph.nodes if n.op == "placeholder"]) == 2


def test_a_tensor_with_two_names_stays_under_the_one_that_is_read() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(x)

    model, x = Tied(), torch.randn(3, 4)
    module = unlift(model, x)
    drop_dead_code(module)
    close(module)
    assert_same(module(x), model(x))


@pytest.mark.slow
def test_one_file(tmp_path: Path) -> None:
    model, x = Dead(), torch.randn(3, 4)
    results, method = exported(model, [x], tmp_path)
    assert_same(results, model(x), rtol=1e-6, atol=1e-6)
    [report] = [r for r in method.passes if r.name == "drop_dead_code"]
    assert "unused.weight" in report.changed
