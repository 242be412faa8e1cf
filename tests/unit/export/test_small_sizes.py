"""Dynamic sizes of zero and one are taken where the traced shapes are right for them, and refused elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


def lowest(fn: Callable[[torch.Tensor], torch.Tensor], dim: Any, size: int = 3) -> int:
    shapes = None if dim is None else ({0: dim},)
    traced = export_program(Method("f", Model(fn), (torch.ones(size, 4),), None, shapes), False)
    bounds = next(bounds for name, bounds in traced.program.range_constraints.items() if str(name).startswith("s"))
    return int(bounds.lower)


@pytest.mark.parametrize("dim", [Dim.DYNAMIC, Dim.AUTO, Dim("n")])
def test_sizes_below_two(dim: Any) -> None:
    assert lowest(attention, dim) == 0
    assert lowest(lambda x: x[x > 0], dim) == 0
    assert lowest(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), dim) == 0


@pytest.mark.parametrize("dim", [Dim.DYNAMIC, Dim("n"), Dim("n", min=1)])
@pytest.mark.parametrize(
    "fn", [lambda x: x[1], lambda x: x[:2], lambda x: x.squeeze()], ids=["x[1]", "x[:2]", "squeeze"]
)
def test_shapes_that_hold_from_two_on(fn: Any, dim: Any) -> None:
    assert lowest(fn, dim) == 2


def test_one_and_not_zero() -> None:
    assert lowest(lambda x: x[0], Dim.DYNAMIC) == 1


@pytest.mark.parametrize("dim", [Dim.DYNAMIC(min=2), Dim("n", min=2)])
def test_a_written_minimum_stays(dim: Any) -> None:
    assert lowest(attention, dim) == 2
    assert lowest(attention, Dim("n", min=1)) == 1


@pytest.mark.filterwarnings("error")
def test_an_example_of_size_one() -> None:
    assert lowest(attention, Dim("n"), size=1) == 0
    with pytest.warns(UserWarning, match=r"x.shape\[0\]: the example has the size one, and the model has other"):
        assert lowest(lambda x: x.squeeze(), Dim("n"), size=1) == 2


def test_an_exported_program_stays_as_it_is() -> None:
    program = torch.export.export(Model(attention), (torch.ones(3, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    traced = export_program(Method("f", program), False)
    assert [int(bounds.lower) for bounds in traced.program.range_constraints.values()] == [0]
    assert [int(bounds.lower) for bounds in program.range_constraints.values()] == [2]


def test_two_dimensions_are_tried_together_and_alone() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, y[1]

    shapes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = export_program(Method("f", Two(), (torch.ones(3), torch.ones(3)), None, shapes), False)
    assert sorted(int(bounds.lower) for bounds in traced.program.range_constraints.values()) == [0, 2]


@torch.library.custom_op("untorch_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x.shape[0], int) and x.shape[0] < 2:
        raise NotImplementedError
    return torch.empty_like(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dim", "size", "low"), [(Dim("n"), 3, 0), (Dim("n", min=1), 3, 1), (Dim.DYNAMIC, 3, 2), (Dim.DYNAMIC, 1, 1)]
)
def test_what_cannot_be_tried_stays(dim: Any, size: int, low: int) -> None:
    assert lowest(opaque, dim, size) == low
