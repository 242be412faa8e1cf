"""Tests of exact_floor_division: before, after, and results of files with and without the pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn

from untorch.export.passes.exact_floor_division import exact_floor_division
from untorch.export.patches import torch_version

DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Divides(nn.Module):
    """Every division by, and of, a 0-D constant; and by a constant that is not one."""

    def __init__(self, divisor: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("divisor", torch.tensor(divisor, dtype=dtype))
        self.register_buffer("row", torch.tensor([divisor, 7, divisor], dtype=dtype))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for a, b in ((x, self.divisor), (self.divisor, x), (x, self.divisor.detach()), (x, self.row)):
            results += [
                torch.div(a, b, rounding_mode="floor"), a // b, torch.div(a, b, rounding_mode="trunc"),
                torch.remainder(a, b), torch.fmod(a, b),
            ]  # fmt: skip
        return results


def values(dtype: torch.dtype) -> torch.Tensor:
    """Edges of the type and small numbers of both signs; no zero, and not the least, which overflows when negated."""
    info = torch.iinfo(dtype)
    numbers = [info.min + 1, -100, -7, -6, -5, -3, -2, -1, 1, 2, 3, 5, 6, 7, 100, info.max - 1, info.max]
    numbers += [2**53 + 1, -(2**53) - 1, 2**24 + 1, -(2**24) - 1]
    numbers = sorted({n for n in numbers if n and info.min < n <= info.max})
    numbers += [1] * (-len(numbers) % 3)
    return torch.tensor(numbers * 8, dtype=dtype).view(-1, 3)


def test_before_and_after() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("divisor", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.div(x, self.divisor, rounding_mode="trunc") + self.divisor.detach() // x

    model, x = Both(), torch.tensor([-7, -1, 1, 7])
    module = unlift(model, x)
    assert targets(module) == ["self.divisor", "div.Tensor_mode", "detach", "floor_divide", "add.Tensor"]
    report = exact_floor_division(module)
    close(module)
    assert targets(module) == [
        "self.divisor", "full", "div.Tensor_mode", "detach", "full", "floor_divide", "add.Tensor",
    ]  # fmt: skip
    assert report.changed == ["div", "floor_divide"]
    assert_same(module(x), model(x))


class DividesEach(nn.Module):
    """One of each dtype, in one file."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Divides(3 if dtype == torch.uint8 else -3, dtype) for dtype in DTYPES)

    def forward(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        return [result for part, x in zip(self.parts, xs, strict=True) for result in part(x)]


@pytest.mark.slow
def test_a_file_is_exact(tmp_path: Path) -> None:
    model, xs = DividesEach(), [values(dtype) for dtype in DTYPES]
    results, method = exported(model, xs, tmp_path)
    assert_same(results, model(*xs))
    [report] = [r for r in method.passes if r.name == "exact_floor_division"]
    assert len(report.changed) == 12 * len(DTYPES)


@pytest.mark.slow
def test_a_result_of_folding_is_a_constant_too(tmp_path: Path) -> None:
    class Literal(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [x // torch.tensor(3), torch.tensor(100) // x, torch.div(x, torch.tensor(3), rounding_mode="trunc")]

    x = values(torch.int64)
    results, _ = exported(Literal(), [x], tmp_path)
    assert_same(results, Literal()(x))


@pytest.mark.slow
@pytest.mark.skipif(torch_version() >= (2, 14), reason="it no longer does")
def test_torch_still_forgets_that_it_is_an_integer(tmp_path: Path) -> None:
    """When this fails, the pass is no longer needed with this torch."""

    class Floor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("divisor", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x // self.divisor

    x = torch.tensor([-7, -1, 1, 7])
    (got,), _ = exported(Floor(), [x], tmp_path, passes={"exact_floor_division": False})
    assert got.tolist() == [-2, 0, 0, 2]
    assert Floor()(x).tolist() == [-3, -1, 0, 2]


@pytest.mark.slow
@given(
    dtype=st.sampled_from(DTYPES),
    divisor=st.integers(-128, 127).filter(bool),
    numbers=st.lists(st.integers(-127, 127).filter(bool), min_size=3, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_the_rewritten_graph_gives_the_same(dtype: torch.dtype, divisor: int, numbers: list[int]) -> None:
    if dtype == torch.uint8:
        divisor, numbers = abs(divisor), [abs(n) for n in numbers]
    model, x = Divides(divisor, dtype), torch.tensor([numbers], dtype=dtype)
    module = unlift(model, x)
    exact_floor_division(module)
    close(module)
    assert_same(module(x), model(x))


@pytest.mark.parametrize(("a", "b"), [(torch.int32, torch.int64), (torch.int8, torch.uint8), (torch.bool, torch.int64)])
def test_types_are_promoted_as_before(a: torch.dtype, b: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("divisor", torch.tensor(2, dtype=b))

        def forward(self, x: torch.Tensor) -> Any:
            return x // self.divisor, x[0] // self.divisor

    model, x = Mixed(), torch.tensor([1, 0, 1]).to(a)
    module = unlift(model, x)
    assert exact_floor_division(module).changed
    close(module)
    assert_same(module(x), model(x))


def test_what_stays() -> None:
    class Stays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("step", torch.tensor(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            results = [x // 3, y // self.scale, x // x[0], y / self.scale, x // self.step]
            self.step.add_(1)
            return results

    module = unlift(Stays(), torch.tensor([4, 5]), torch.tensor([4.0, 5.0]))
    before = targets(module)
    report = exact_floor_division(module)
    assert targets(module) == before
    assert list(report.skipped.values()) == ["step is not a constant: the model writes into it"]
