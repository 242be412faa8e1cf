"""Observers of activations: the range of a tensor over calibration batches, and the uint8 scale and zero point of it.

    "minmax"      the least and the largest value
    "percentile"  the range without the outermost (100 − percentile) / 2 % of the values on each side
    "mse"         the range whose uint8 values have the least squared error

The last two count values in a histogram of ``BINS`` bins. Where a batch goes beyond its range, bins are merged in pairs
until it fits, so each batch is seen once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["BINS", "OBSERVERS", "Observer", "make_observer", "scale_and_zero"]

BINS = 4096
OBSERVERS = ("minmax", "percentile", "mse")
_LEAST_SCALE = 2.0**-126
_CANDIDATES = 64  # clipped ranges that "mse" tries a round


class Observer(Protocol):
    """What sees a tensor once a batch."""

    def update(self, values: torch.Tensor) -> None:
        """Takes the values of one batch; those that are not finite do not count."""

    def range(self) -> tuple[float, float]:
        """The range, with 0 in it."""


def make_observer(kind: str, percentile: float = 99.99) -> Observer:
    """A new observer of a kind in ``OBSERVERS``. Raises InvalidArgumentError."""
    if kind == "minmax":
        return _MinMax()
    if kind == "percentile":
        if not 50 < percentile <= 100:
            raise InvalidArgumentError(f"make_observer: percentile: expected above 50, at most 100, got {percentile}")
        return _Percentile(percentile)
    if kind == "mse":
        return _Mse()
    raise InvalidArgumentError(f"make_observer: kind: expected one of {', '.join(OBSERVERS)}, got {kind!r}")


def scale_and_zero(low: float, high: float) -> tuple[float, int]:
    """The uint8 scale and zero point of the range: low becomes 0 and high 255. 0 has a value of its own."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / 255.0, _LEAST_SCALE)
    # As float32, which the kernels read.
    scale = float(torch.tensor(scale, dtype=torch.float32))
    return scale, min(max(round(-low / scale), 0), 255)


def _finite(values: torch.Tensor) -> torch.Tensor:
    values = values.detach().reshape(-1).float()
    finite = torch.isfinite(values)
    return values if bool(finite.all()) else values[finite]


class _MinMax:
    def __init__(self) -> None:
        self._low, self._high = 0.0, 0.0

    def update(self, values: torch.Tensor) -> None:
        values = _finite(values)
        if values.numel():
            low, high = torch.aminmax(values)
            self._low, self._high = min(self._low, float(low)), max(self._high, float(high))

    def range(self) -> tuple[float, float]:
        return self._low, self._high


class _Histogram:
    """Counts of values in BINS bins of equal width from −reach to reach."""

    def __init__(self) -> None:
        self._reach = 0.0
        self._counts = torch.zeros(BINS, dtype=torch.float64)
        self._low, self._high = 0.0, 0.0

    def update(self, values: torch.Tensor) -> None:
        values = _finite(values)
        if not values.numel():
            return
        low, high = (float(value) for value in torch.aminmax(values))
        self._low, self._high = min(self._low, low), max(self._high, high)
        largest = max(-low, high)
        if not largest:
            self._reach = self._reach or 2.0**-20  # zeros: any width holds them
        elif not self._reach:
            self._reach = largest
        while largest > self._reach:
            # Pairs of bins become one, in the middle half.
            pairs = self._counts.reshape(-1, 2).sum(1)
            self._counts = torch.zeros_like(self._counts)
            self._counts[BINS // 4 : BINS - BINS // 4] = pairs
            self._reach *= 2
        self._counts += torch.histc(values, BINS, -self._reach, self._reach).double()

    def edges(self) -> torch.Tensor:
        return torch.linspace(-self._reach, self._reach, BINS + 1, dtype=torch.float64)


class _Percentile(_Histogram):
    def __init__(self, percentile: float) -> None:
        super().__init__()
        self._percentile = percentile

    def range(self) -> tuple[float, float]:
        total = float(self._counts.sum())
        if not total:
            return 0.0, 0.0
        outside = total * (100.0 - self._percentile) / 200.0
        below = self._counts.cumsum(0)
        edges = self.edges()
        # The first bin that is not wholly outside, and the last.
        first = int(torch.searchsorted(below, torch.tensor(outside, dtype=torch.float64), right=True))
        last = int(torch.searchsorted(below, torch.tensor(total - outside, dtype=torch.float64)))
        low, high = float(edges[min(first, BINS - 1)]), float(edges[min(last, BINS - 1) + 1])
        return min(max(low, self._low), 0.0), max(min(high, self._high), 0.0)


class _Mse(_Histogram):
    def range(self) -> tuple[float, float]:
        if not float(self._counts.sum()):
            return 0.0, 0.0
        low, high = self._low, self._high
        for _ in range(2):  # one side, then the other, from the best so far
            high = self._best([(low, high * (i + 1) / _CANDIDATES) for i in range(_CANDIDATES)])[1]
            low = self._best([(low * (i + 1) / _CANDIDATES, high) for i in range(_CANDIDATES)])[0]
        return low, high

    def _best(self, ranges: list[tuple[float, float]]) -> tuple[float, float]:
        edges = self.edges()
        used = self._counts > 0
        centres, counts = ((edges[:-1] + edges[1:]) / 2)[used], self._counts[used]
        errors = []
        for low, high in ranges:
            scale, zero = scale_and_zero(low, high)
            steps = ((centres / scale).round() + zero).clamp(0, 255) - zero
            errors.append(float(((steps * scale - centres).square() * counts).sum()))
        return ranges[min(range(len(errors)), key=errors.__getitem__)]
