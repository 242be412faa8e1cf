"""Which conditions on sizes a trace depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from untorch.export.method import Method
from untorch.export.tracing import export_program


class Model(nn.Module):
    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def guards(fn: Any, size: int = 8, dim: Any = Dim.DYNAMIC) -> list[Any]:
    method = Method("f", Model(fn), (torch.ones(3, size, 8),), None, ({0: dim, 1: dim},))
    return export_program(method, False).guards


def padded(x: torch.Tensor) -> torch.Tensor:
    more = -x.shape[1] % 4
    if more > 0:
        x = F.pad(x, (0, 0, 0, more))
    return x.view(x.shape[0], -1, 4, 8).mean(2)


@pytest.mark.slow
def test_a_branch_is_a_condition() -> None:
    (guard,) = guards(lambda x: x if x.shape[1] % 2 == 0 else -x)
    assert guard.text == "(x.shape[1] % 2) == 0"
    assert guard.frame.path == __file__
    assert guard.brief.startswith("(x.shape[1] % 2) == 0 (test_size_guards.py:")
    even, odd = guards(padded, 8), guards(padded, 6)
    assert [guard.frame.text for guard in (*even, *odd)] == ["if more > 0:"] * 2
    assert even[0].text.endswith("<= 0")
    assert odd[0].text.endswith("> 0")


def test_shapes_that_other_sizes_do_not_have_are_a_condition() -> None:
    (guard,) = guards(lambda x: x.reshape(x.shape[0], x.shape[1] // 4, 4, 8))
    assert guard.frame is None
    assert "x.shape[1] // 4" in guard.text


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2,
        lambda x: x[:, 1:] - x[:, :-1],
        lambda x: x + torch.ones(64, 8)[: x.shape[1]],
        lambda x: F.conv1d(x.mT, torch.ones(8, 8, 3), stride=2),
        lambda x: x.chunk(2, 1)[0],
        lambda x: F.interpolate(x.mT, scale_factor=2.0),
        lambda x: torch.roll(x, -x.shape[1] // 2, 1),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x if x.shape[1] <= 16 else -x,  # a range, which the loader checks
    ],
)
def test_what_torch_assumes_and_nothing_depends_on(fn: Any) -> None:
    assert guards(fn) == []


def test_numbers_that_vary() -> None:
    class Number(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n if n > 4 else x

    method = Method("f", Number(), (torch.ones(3), 7), None, {"x": None, "n": Dim.DYNAMIC})
    traced = export_program(method, False)
    bounds = next(iter(traced.program.range_constraints.values()))
    assert bounds.lower == 5 or [guard.text for guard in traced.guards] == ["n > 4"]


def test_no_dynamic_sizes() -> None:
    assert export_program(Method("f", Model(padded), (torch.ones(3, 8, 8),)), False).guards == []
