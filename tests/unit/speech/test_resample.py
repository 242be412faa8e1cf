"""Sample-rate conversion against signals whose conversion is known."""

from __future__ import annotations

import numpy as np
import pytest

from untorch.runtime.errors import InvalidArgumentError
from untorch.speech import resample
from untorch.speech.resample import _filtered

RATES = [(48000, 16000), (44100, 16000), (8000, 16000), (16000, 44100), (22050, 16000), (16000, 8000), (44101, 16000)]


def tone(frequency: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize(("source", "target"), RATES)
def test_tones_that_are_kept(source: int, target: int) -> None:
    """Up to 85 % of the lower half, with an error of less than 0.1 %; where the filter sees silence does not count."""
    for part in (0.01, 0.3, 0.7, 0.85):
        frequency = part * min(source, target) / 2
        found = resample(tone(frequency, source), source, target)
        assert len(found) == -(-round(source * 0.5) * target // source)
        wanted = tone(frequency, target)[: len(found)]
        edge = len(wanted) // 8
        assert np.abs(found[: len(wanted)] - wanted)[edge:-edge].max() < 1e-3, part


@pytest.mark.parametrize(("source", "target"), [(48000, 16000), (44100, 16000), (16000, 8000)])
def test_tones_that_would_fold(source: int, target: int) -> None:
    found = resample(tone(1.02 * target / 2, source), source, target)
    edge = len(found) // 8
    assert np.abs(found[edge:-edge]).max() < 3.2e-4  # 70 dB


def test_a_constant_stays_one() -> None:
    found = resample(np.full(5000, 0.25, np.float32), 44100, 16000)
    assert np.abs(found[200:-200] - 0.25).max() < 1e-6


@pytest.mark.parametrize("step", [1, 3, 7, 200])
def test_filters(step: int) -> None:
    """Windows that overlap, and those that do not, against the sum itself."""
    rng = np.random.default_rng(0)
    signal, taps = rng.normal(size=5000).astype(np.float32), rng.normal(size=150).astype(np.float32)
    rows = (len(signal) - len(taps)) // step
    wanted = [np.dot(signal[step * row :][:150].astype(float), taps) for row in range(rows)]
    np.testing.assert_allclose(_filtered(signal, taps, step, rows), wanted, rtol=1e-4, atol=1e-4)


def test_little() -> None:
    assert resample(np.ones(1, np.float32), 48000, 16000).shape == (1,)
    assert resample(np.empty(0, np.float32), 48000, 16000).shape == (0,)
    x = np.ones(3, np.float32)
    assert resample(x, 8000, 8000) is x


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (3999, 16000, "resample: source: expected a rate from 4000 to 384000 Hz, got 3999"),
        (16000, 1 << 20, "resample: target: expected a rate from 4000 to 384000 Hz, got 1048576"),
        (16000.0, 8000, "resample: source: expected a rate"),
    ],
)
def test_rates(source: int, target: int, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        resample(np.ones(4), source, target)


def test_dimensions() -> None:
    with pytest.raises(InvalidArgumentError, match=r"resample: samples: expected one dimension, got \[2, 3\]"):
        resample(np.ones((2, 3)), 8000, 16000)
