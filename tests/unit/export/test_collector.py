"""The garbage collector's thresholds: raised while a model is traced and compiled, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from untorch.export.collector import rare_collections
from untorch.export.method import Method
from untorch.export.tracing import trace_method


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_collections_are_rarer_meanwhile() -> None:
    with rare_collections():
        assert gc.get_threshold() == (20_000, 10, 50)
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(ZeroDivisionError), rare_collections():
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize(("before", "meanwhile"), [((0, 10, 10), (0, 10, 10)), ((50_000, 5, 100), (50_000, 10, 100))])
def test_a_collector_that_is_off_or_rarer_stays(before: tuple[int, int, int], meanwhile: tuple[int, int, int]) -> None:
    gc.set_threshold(*before)
    with rare_collections():
        assert gc.get_threshold() == meanwhile
    assert gc.get_threshold() == before


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_traced_with_them() -> None:
    seen = []

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.get_threshold())
            return x + 1

    trace_method(Method("forward", Model(), (torch.zeros(2),)))
    assert set(seen) == {(20_000, 10, 50)} and gc.get_threshold() == (700, 10, 10)
