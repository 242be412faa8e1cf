"""Conditions on values that a model only checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export.patches.conditions import checked_conditions, unchecked_distributions
from untorch.export.patches.tracing import no_graph_dump


class Model(nn.Module):
    def __init__(self, fn: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        self.fn(x)
        return x * 2


def asserts(x: torch.Tensor) -> None:
    assert (x > -5).all(), "small"


def asserts_not(x: torch.Tensor) -> None:
    assert not (x.isnan().any() or x.min() < -5)


def chained(x: torch.Tensor) -> None:
    assert -5 < x.min() < 5


def raises(x: torch.Tensor) -> None:
    if x.isnan().any() or (x < -5).any():
        message = "wrong"
        raise ValueError(message)


def branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x


def either(x: torch.Tensor) -> None:
    assert x.sum() > 0 or x.sum() < -3


def some(x: torch.Tensor) -> None:
    assert any(value > 0 for value in x)


def mixed(x: torch.Tensor) -> None:
    assert (x > -5).all() and not x.isnan().any()


def goes_on(x: torch.Tensor) -> None:
    if x.sum() > 0:
        x = x + 1


def export(fn: Callable[[torch.Tensor], Any]) -> nn.Module:
    with no_graph_dump():
        return torch.export.export(Model(fn), (torch.ones(3),)).module()


@pytest.mark.filterwarnings("ignore")
def test_torch_still_refuses_assertions() -> None:
    for fn in (asserts, raises):
        with pytest.raises(Exception, match="Could not guard on data-dependent expression"):
            export(fn)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fn", [asserts, asserts_not, chained, raises])
def test_what_a_model_checks_is_checked(fn: Any) -> None:
    with checked_conditions():
        module = export(fn)
    assert module(torch.tensor([0.0, -4, 3])).tolist() == [0, -8, 6]
    with pytest.raises(RuntimeError):
        module(torch.tensor([0.0, -6, 3]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fn", [branch, either, some, mixed, goes_on])
def test_both_sides_go_on(fn: Any) -> None:
    with checked_conditions(), pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        export(fn)


class Policy(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normal = torch.distributions.Normal(x, x.exp())
        choice = torch.distributions.Categorical(logits=x)
        return normal.log_prob(x + 1), choice.entropy()


@pytest.mark.filterwarnings("ignore")
def test_torch_still_validates_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile takes it away for good.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    x = torch.randn(2, 3)
    with no_graph_dump(), pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        torch.export.export(Policy(), (x,))
    with unchecked_distributions():
        module = torch.export.export(Policy(), (x,)).module()
    torch.testing.assert_close(module(x), Policy()(x))
    assert torch.distributions.Distribution._validate_args
