"""Examples of size one in dynamic dimensions are traced with two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection

from untorch.export.example_sizes import double_sizes_of_one
from untorch.export.method import Method
from untorch.export.tracing import export_program


class Model(nn.Module):
    def forward(self, x: torch.Tensor, y: Any = None, *, scale: Any = None) -> torch.Tensor:
        return x * 2


def test_named_and_derived_dimensions_grow_together() -> None:
    image = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = Dim("batch")
    shapes = ({0: batch}, {"a": (2 * batch, None)}, {0: batch, 1: Dim.DYNAMIC})
    made = double_sizes_of_one("f", Model(), (image, {"a": torch.ones(2, 5)}), {"scale": torch.ones(1, 1)}, shapes)
    assert made.doubled == [
        "x.shape[0] (batch)", "y['a'].shape[0] (2*batch)", "scale.shape[0] (batch)", "scale.shape[1]",
    ]  # fmt: skip
    x, y = made.args
    assert x.shape == (2, 3, 4, 4)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x[0], image[0])
    assert torch.equal(x[1], image[0])
    assert y["a"].shape == (4, 5)
    assert made.kwargs is not None
    assert made.kwargs["scale"].shape == (2, 2)


def test_what_stays() -> None:
    x = torch.ones(1, 3)
    for shapes in (
        None, {"x": {0: Dim.STATIC}}, {"x": {0: 1}}, {"x": None}, {"x": {0: Dim("n", max=1)}}, {"x": {1: Dim("n")}},
        {"wrong": {0: Dim("n")}}, ({0: Dim("n")}, {0: Dim("n")}),
    ):  # fmt: skip
        made = double_sizes_of_one("f", Model(), (x,), None, shapes)
        assert made.args[0] is x
        assert made.doubled == []
    assert double_sizes_of_one("f", Model(), (torch.tensor(1.0),), None, {"x": None}).doubled == []


def test_a_collection_of_shapes() -> None:
    x = torch.ones(1, 3)
    shapes = ShapesCollection()
    shapes[x] = {0: Dim("n")}
    made = double_sizes_of_one("f", Model(), (x,), None, shapes)
    assert made.args[0].shape == (2, 3)
    assert made.dynamic_shapes["x"][0].__name__ == "n"


def test_auto_says_that_it_is_static() -> None:
    with pytest.warns(UserWarning, match=r"method 'f': x.shape\[0\] is Dim.AUTO with an example of size one, which"):
        made = double_sizes_of_one("f", Model(), (torch.ones(1, 3),), None, ({0: Dim.AUTO},))
    assert made.doubled == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dim", "low"), [(Dim("n", min=1, max=9), 1), (Dim.DYNAMIC, 0), (Dim("n"), 0)])
def test_the_program_takes_one(dim: Any, low: int) -> None:
    traced = export_program(Method("f", nn.Linear(3, 4), (torch.ones(1, 3),), None, ({0: dim},)), False)
    assert traced.notes[0].startswith("traced with two in the place of one: input.shape[0]")
    (bounds,) = traced.program.range_constraints.values()
    assert bounds.lower == low
