"""Tests of cond_predicates_to_host: before, after, predicates that stay, and the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn

from untorch.export.passes import PassReport
from untorch.export.passes.cond_predicates_to_host import cond_predicates_to_host


class Switch(nn.Module):
    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(flag))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(self.flag, lambda x: self.linear(x), lambda x: x * 2, (x,)) + 1


def run(model: nn.Module, *args: torch.Tensor) -> tuple[list[str], list[str], PassReport]:
    module = unlift(model, *args)
    before = targets(module)
    expected = model(*(a.clone() for a in args))
    report = cond_predicates_to_host(module)
    close(module)
    assert_same(module(*(a.clone() for a in args)), expected)
    return before, targets(module), report


def test_before_and_after() -> None:
    before, after, report = run(Switch(True), torch.randn(3, 4))
    tensors = ["self.linear.weight", "self.linear.bias", "self.flag"]
    assert before == [*tensors, "self.true_graph_0", "self.false_graph_0", "cond", "getitem", "add.Tensor"]
    assert after == [*tensors, "linear", "add.Tensor"]
    assert report.changed == ["cond: True"]
    _, after, report = run(Switch(False), torch.randn(3, 4))
    assert after == [*tensors, "mul.Tensor", "add.Tensor"]
    assert report.changed == ["cond: False"]


def test_branches_that_are_gone_leave_the_module() -> None:
    module = unlift(Switch(True), torch.randn(3, 4))
    cond_predicates_to_host(module)
    assert not any(name.endswith("graph_0") for name, _ in module.named_modules())


@pytest.mark.slow
@pytest.mark.parametrize("flag", [True, False])
def test_one_file(flag: bool, tmp_path: Path) -> None:
    model, x = Switch(flag), torch.randn(3, 4)
    results, method = exported(model, [x], tmp_path)
    assert_same(results, model(x), rtol=1e-6, atol=1e-6)
    [report] = [r for r in method.passes if r.name == "cond_predicates_to_host"]
    assert report.changed == [f"cond: {flag}"]


def test_chains_of_constants_and_several_results() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            off = torch.logical_not(self.level > 2)
            a, b = torch.cond(off, lambda x: (x + 1, x.sin()), lambda x: (x * 2, x.cos()), (x,))
            return a - b

    _, after, _ = run(Chain(), torch.randn(3))
    assert after == ["self.level", "gt.Scalar", "logical_not", "mul.Tensor", "cos", "sub.Tensor"]


@pytest.mark.slow
def test_conditions_inside_of_the_branch_that_is_taken() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("outer", torch.tensor(True))
            self.register_buffer("inner", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def taken(x: torch.Tensor) -> torch.Tensor:
                known = torch.cond(self.inner, lambda x: x.sin(), lambda x: x.cos(), (x,))
                return known + torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

            return torch.cond(self.outer, taken, lambda x: x * 2, (x,))

    for sign in (1, -1):
        _, after, report = run(Nested(), sign * torch.rand(3))
        assert [t for t in after if "self." not in t] == [
            "cos", "sum", "gt.Scalar", "cond", "getitem", "add.Tensor",
        ]  # fmt: skip
        assert len(report.changed) == 2
        assert list(report.skipped.values()) == ["the predicate is not known before the call"]


def test_predicates_that_stay() -> None:
    class Dynamic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flag", torch.tensor(True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(self.flag, lambda x: x.sin(), lambda x: x.cos(), (x,))
            self.flag.logical_not_()
            return y

    cases: list[tuple[nn.Module, Any]] = [
        (Dynamic(), "the predicate is not known before the call"),
        (Written(), "the model writes into the predicate"),
    ]
    for model, reason in cases:
        module = unlift(model, torch.randn(3))
        before = targets(module)
        report = cond_predicates_to_host(module)
        assert targets(module) == before
        assert not report.changed
        assert list(report.skipped.values()) == [reason]
