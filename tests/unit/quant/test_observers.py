"""Observers: their ranges on known distributions, over batches of growing reach, and the scales made of them."""

from __future__ import annotations

import pytest
import torch

from untorch.quant.observers import OBSERVERS, make_observer, scale_and_zero
from untorch.runtime.errors import InvalidArgumentError


def quantised_error(values: torch.Tensor, low: float, high: float) -> float:
    scale, zero = scale_and_zero(low, high)
    return float((((values / scale).round() + zero).clamp(0, 255).sub(zero) * scale - values).square().mean())


@pytest.mark.parametrize("kind", OBSERVERS)
def test_what_every_range_has(kind: str) -> None:
    """0, nothing beyond the values, and no value that is not finite."""
    observer = make_observer(kind)
    assert observer.range() == (0.0, 0.0)
    observer.update(torch.zeros(3, 4))
    assert observer.range() == (0.0, 0.0)
    observer.update(torch.tensor([3.0, 5.0, float("inf"), float("nan"), -float("inf")]))
    low, high = observer.range()
    assert low == 0.0
    assert 3.0 < high <= 5.0
    observer.update(torch.full((2,), float("nan")))
    observer.update(torch.empty(0))
    assert observer.range() == (low, high)


def test_minmax_is_exact() -> None:
    observer = make_observer("minmax")
    observer.update(torch.tensor([[-2.5, 1.0]]))
    observer.update(torch.tensor([7.25]))
    assert observer.range() == (-2.5, 7.25)


@pytest.mark.parametrize("share", [90.0, 99.0, 100.0])
def test_percentile(share: float) -> None:
    torch.manual_seed(0)
    values = torch.rand(100_000) * 2 - 1
    observer = make_observer("percentile", share)
    for batch in (values[:1000] / 16, *values.split(9000)):  # bins are merged on the way
        observer.update(batch)
    everything = torch.cat([values, values[:1000] / 16])
    cut = (100 - share) / 200
    expected = torch.quantile(everything, torch.tensor([cut, 1 - cut]))
    assert observer.range() == pytest.approx(expected.tolist(), abs=2e-3)


def test_mse_clips_an_outlier() -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(200_000), torch.tensor([60.0])])
    observer = make_observer("mse")
    observer.update(values)
    low, high = observer.range()
    assert high < 60
    assert quantised_error(values, low, high) < 0.8 * quantised_error(values, float(values.min()), 60.0)


def test_mse_keeps_an_even_distribution() -> None:
    observer = make_observer("mse")
    observer.update(torch.linspace(-1, 3, 10_000))
    assert observer.range() == pytest.approx((-1.0, 3.0), abs=0.1)


def test_scales() -> None:
    assert scale_and_zero(0.0, 255.0) == (1.0, 0)
    assert scale_and_zero(-255.0, 0.0) == (1.0, 255)
    assert scale_and_zero(10.0, 255.0) == (1.0, 0)  # 0 is in every range
    assert scale_and_zero(-1.0, 1.0)[1] in (127, 128)
    assert scale_and_zero(0.0, 0.0) == (2.0**-126, 0)


def test_errors() -> None:
    with pytest.raises(InvalidArgumentError, match="kind: expected one of minmax, percentile, mse, got 'max'"):
        make_observer("max")
    with pytest.raises(InvalidArgumentError, match="percentile: expected above 50, at most 100, got 50"):
        make_observer("percentile", 50)
