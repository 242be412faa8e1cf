"""Tests of fold_constants: before, after, the limits, what is never folded, and the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import fx, nn

from untorch.export.passes import PassReport
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.fold_constants import fold_constants

MIB = 1 << 20


class Holds(nn.Module):
    """``function`` with a weight [4, 6], a row [6] and a step that tests may write."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, generator=generator))
        self.register_buffer("row", torch.randn(6, generator=generator))
        self.register_buffer("step", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def run(
    function: Callable[[Any, torch.Tensor], Any], limit: int = 16 * MIB
) -> tuple[list[str], list[str], PassReport, fx.GraphModule]:
    model, x = Holds(function), torch.randn(6)
    module = unlift(model, x)
    drop_dead_code(module)
    before = targets(module)
    report = fold_constants(module, limit)
    close(module)
    torch.manual_seed(1)
    got = module(x)
    torch.manual_seed(1)
    assert_same(got, model(x))
    return before, targets(module), report, module


def test_before_and_after() -> None:
    before, after, report, module = run(lambda m, x: (m.weight.t() @ m.weight).double() @ x.double())
    check = "_assert_tensor_metadata"
    assert before == ["self.weight", "t", "matmul", check, "to.dtype", check, "to.dtype", "matmul"]
    assert after == ["self.to_folded", check, "to.dtype", "matmul"]
    assert report.changed == ["to"]
    folded = module.get_buffer("to_folded")
    assert folded.dtype == torch.float64
    assert not folded.requires_grad


@pytest.mark.slow
def test_one_file(tmp_path: Path) -> None:
    model, x = Holds(lambda m, x: (m.weight * m.row).softmax(1) @ x), torch.randn(6)
    results, method = exported(model, [x], tmp_path)
    assert_same(results, model(x), rtol=1e-6, atol=1e-6)
    [report] = [r for r in method.passes if r.name == "fold_constants"]
    assert report.changed == ["softmax"]


@pytest.mark.slow
def test_a_folded_weight_is_packed(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model, x = Normed(), torch.randn(3, 32)
    results, method = exported(model, [x], tmp_path)
    assert_same(results, model(x), rtol=1e-5, atol=1e-5)
    reports = {report.name: report for report in method.passes}
    assert reports["fold_constants"].changed
    assert reports["pack_linears"].changed == ["linear"]


def test_a_value_that_is_used_twice_is_stored_once() -> None:
    _, after, report, _ = run(lambda m, x: (x * (m.row + 1), x - (m.row + 1).sin(), x + m.row))
    assert report.changed == ["add", "sin"]
    _, after, report, _ = run(lambda m, x: (lambda y: (x * y, x - y))(m.row + 1))
    assert after == ["self.add_folded", "mul.Tensor", "sub.Tensor"]


def test_views_of_a_tensor_stay_views() -> None:
    before, after, report, _ = run(lambda m, x: (m.weight.t()[1:3].reshape(4, 2), x * m.row.expand(3, 6)))
    assert after == before
    assert not report.changed
    before, after, report, _ = run(lambda m, x: (lambda parts: parts[0] * x + parts[1])(m.weight.chunk(2)))
    assert after == before
    assert not report.changed
    _, after, _, _ = run(lambda m, x: (lambda parts: parts[0] * x + parts[1])((m.weight * 2).chunk(2)))
    assert after[:2] == ["self.mul_folded", "chunk"]
    _, after, _, module = run(lambda m, x: (m.row * 2).expand(1000, 6) * x)
    assert after == ["self.mul_folded", "expand", "mul.Tensor"]
    assert module.get_buffer("mul_folded").shape == (6,)


def test_numbers_alone_are_not_stored() -> None:
    before, after, _, _ = run(lambda m, x: x * torch.arange(6).cos())
    assert after == before
    _, after, report, _ = run(lambda m, x: x * (m.row[:, None] * torch.arange(6)).cos())
    assert report.changed == ["cos"]
    assert after == ["self.cos_folded", "mul.Tensor"]


def test_a_name_that_is_taken() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("add_folded", torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.add_folded + (self.add_folded + 1)

    model, x = Taken(), torch.randn(6)
    module = unlift(model, x)
    fold_constants(module, MIB)
    close(module)
    assert "self.add_folded_1" in targets(module)
    assert_same(module(x), model(x))


def test_several_results_of_one_operator() -> None:
    _, after, report, _ = run(lambda m, x: (lambda p: x * p[0] + p[1])(torch.var_mean(m.weight, 0)))
    assert sorted(after) == ["add.Tensor", "mul.Tensor", "self.getitem_1_folded", "self.getitem_folded"]
    assert report.changed == ["getitem", "getitem_1"]


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda m, x: x * (m.row + torch.rand(6)), "rand"),
        (lambda m, x: x * torch.bernoulli(m.row.sigmoid()), "bernoulli"),
        (lambda m, x: (x[:2] * m.step.exp(), m.step.add_(1).sum())[0], "exp"),
        (lambda m, x: (x[:2] * m.step[:1].exp(), m.step[1:].add_(1).sum())[0], "exp"),
        (lambda m, x: x * (m.row + 1).uniform_(), "uniform_"),
        (lambda m, x: x * (m.row + 1).mul_(x), "mul_.Tensor"),
        (lambda m, x: (lambda y: (x * y, y.mul_(2))[0])(m.row + 1), "mul_.Tensor"),
        (lambda m, x: (lambda y: (y.mul_(2), x * y, y[:3].add_(1))[1])(m.row + 1), "mul_.Tensor"),
        (lambda m, x: x[:4] * m.row.new_empty(4).mul_(m.row[:4]), "mul_.Tensor"),
        (lambda m, x: x[:2] * m.step.view(2).mul_(2), "mul_.Tensor"),
    ],
)
def test_what_is_never_folded(function: Callable[[Any, torch.Tensor], Any], kept: str) -> None:
    module = unlift(Holds(function), torch.randn(6))
    before = targets(module)
    report = fold_constants(module, MIB)
    assert kept in targets(module)
    assert not any(name in report.changed for name in ("add_", "mul_"))
    if kept != "bernoulli":
        assert targets(module) == before


def _mask(m: Any, x: torch.Tensor, length: int = 6) -> torch.Tensor:
    """As shifted windows have it: regions of a tensor that is made, filled one by one, and compared."""
    regions = (x + 1).new_zeros(length)
    for value, region in enumerate((slice(0, -3), slice(-3, -1), slice(-1, None))):
        regions[region] = value
    difference = regions[:, None] - regions[None]
    return difference.masked_fill(difference != 0, -100.0)


def test_a_tensor_that_is_made_and_written() -> None:
    _, after, report, module = run(lambda m, x: x + _mask(m, x))
    assert after == ["add.Tensor", "self.masked_fill_folded", "add.Tensor"], "the first is no longer read"
    assert report.changed == ["masked_fill"]
    assert module.get_buffer("masked_fill_folded")[0].tolist() == [0, 0, 0, -100, -100, -100]
    _, after, report, _ = run(lambda m, x: (m.row + 1).mul_(2)[:3] * x[:3])
    assert after == ["self.add_folded", "slice.Tensor", "slice.Tensor", "mul.Tensor"]
    assert report.changed == ["add"]


def test_the_last_value_of_a_view_that_was_made_before_the_writes() -> None:
    def function(m: Any, x: torch.Tensor) -> Any:
        made = m.row * 2
        early = made[:3]
        made += m.row
        made[1:].mul_(-1)
        return x[:3] * early + made[3:].exp()

    _, after, report, _ = run(function)
    assert report.changed == ["mul", "exp"]
    assert not any(name.endswith("_.Tensor") for name in after)


def test_a_written_tensor_above_the_limit_stays() -> None:
    before, after, report, _ = run(lambda m, x: (m.row[:, None] + m.row).mul_(2) @ x, limit=100)
    assert after == before
    assert list(report.skipped.values()) == ["its 144 bytes are above the limit of 100"]


def test_a_written_tensor_that_is_returned_stays() -> None:
    before, after, report, _ = run(lambda m, x: (x + 1, (m.row + 1).mul_(2)))
    assert after == before
    assert list(report.skipped.values()) == ["an output would become a tensor of the module"]


def test_what_is_filled_with_one_number() -> None:
    def function(m: Any, x: torch.Tensor) -> Any:
        parts = [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3), x.new_full((6,), 4.0), x.new_ones(6)]
        return torch.stack([part * m.row for part in parts]).sum(0) * x

    _, after, report, _ = run(function)
    assert report.changed == ["sum_1"]
    assert after == ["self.sum_1_folded", "mul.Tensor"]


def test_random_numbers_whose_sizes_alone_are_read_stay() -> None:
    _, after, report, _ = run(lambda m, x: x * (m.row + torch.rand(6).new_ones(6)) + torch.rand(6))
    assert after.count("rand") == 2
    assert report.changed == ["add"]


def test_a_buffer_in_memory_that_is_written_through_another() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.ones(6)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[:3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.part.exp()
            self.whole.add_(1)
            return y

    module = unlift(Shared(), torch.randn(3))
    before = targets(module)
    fold_constants(module, MIB)
    assert targets(module) == before


def test_an_output_is_made_anew() -> None:
    before, after, report, _ = run(lambda m, x: (x + 1, (m.row + 1)[None]))
    assert after == before
    assert list(report.skipped.values()) == ["an output would become a tensor of the module"]


def test_the_limit_of_one_result() -> None:
    _, after, report, _ = run(lambda m, x: (m.row.exp()[:, None] * m.row).sin() * x, limit=100)
    assert report.changed == ["exp"]
    assert "its 144 bytes are above the limit of 100" in report.skipped.values()
    assert after == ["self.row", "self.exp_folded", "unsqueeze", "mul.Tensor", "sin", "mul.Tensor"]
    _, after, report, _ = run(lambda m, x: m.row.exp() * x, limit=0)
    assert not report.changed


def test_the_limit_of_all_results() -> None:
    def three(m: Any, x: torch.Tensor) -> Any:
        return x * m.row.exp() + x * m.row.sin() + x * (m.row[:3].cos().sum() + m.row)

    _, after, report, _ = run(three, limit=48)
    assert len(report.changed) == 3, "72 bytes in place of 24"
    assert "self.row" not in after
    _, after, report, _ = run(three, limit=47)
    assert report.changed == ["add_1"]
    assert list(report.skipped.values()) == ["the folded tensors together would add more than 47 bytes"] * 2
