"""Sample-rate conversion: a polyphase FIR filter, a sinc under a Kaiser window, for any ratio of two rates."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["HIGHEST_RATE", "LOWEST_RATE", "resample"]

LOWEST_RATE, HIGHEST_RATE = 4000, 384000

_ZEROS = 32  # of the sinc, on each side of its middle
_BETA = 9.0  # of the Kaiser window: 90 dB in the stop band
_ROLLOFF = 0.94  # of the lower Nyquist frequency: the middle of the transition band


def resample(samples: NDArray[Any], source: int, target: int) -> NDArray[np.float32]:
    """A mono signal [n] at the rate ``source``, in hertz, as one [⌈n · target / source⌉] at the rate ``target``.

    Frequencies up to 85 % of the lower rate's half are kept; those beyond that half are down by 70 dB and more. Before
    its beginning and behind its end the signal is zero. Rates are from 4000 to 384000.

    Raises InvalidArgumentError.
    """
    for name, rate in (("source", source), ("target", target)):
        if not isinstance(rate, int) or isinstance(rate, bool) or not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise InvalidArgumentError(
                f"resample: {name}: expected a rate from {LOWEST_RATE} to {HIGHEST_RATE} Hz, got {rate!r}"
            )
    signal = np.asarray(samples, np.float32)
    if signal.ndim != 1:
        raise InvalidArgumentError(f"resample: samples: expected one dimension, got {list(signal.shape)}")
    if source == target or not len(signal):
        return signal
    common = math.gcd(source, target)
    up, down = target // common, source // common
    filters, half = _filters(up, down)
    count = -(-len(signal) * up // down)
    # A sample of the result, m, is at m · down / up in the signal; its filter is that of the phase m mod up.
    padded = np.concatenate([np.zeros(half, np.float32), signal, np.zeros(2 * half + down, np.float32)])
    result = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        rows = len(range(phase, count, up))
        first = padded[phase * down // up + 1 :]
        result[phase::up] = _filtered(first, filters[phase], down, rows)
    return result


def _filtered(signal: NDArray[np.float32], taps: NDArray[np.float32], step: int, rows: int) -> NDArray[np.float32]:
    """[rows]: the filter at every ``step``-th sample."""
    # Neither of both starts threads of BLAS, which a server's other requests would wait for.
    if step >= len(taps):  # windows do not overlap
        stride = signal.itemsize
        windows = as_strided(signal, (rows, len(taps)), (step * stride, stride), writeable=False)
        found: NDArray[np.float32] = np.einsum("rt,t->r", windows, taps)
        return found
    total = np.zeros(rows, np.float32)
    for at in range(step):
        part = taps[at::step]
        total += np.correlate(signal[at::step][: rows + len(part) - 1], part, "valid")
    return total


@lru_cache(maxsize=8)
def _filters(up: int, down: int) -> tuple[NDArray[np.float32], int]:
    """A filter for each phase [up, 2 half], and how many samples before the one at or left of the middle it begins.

    Each has the sum 1, so that a constant stays one.
    """
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = math.ceil(_ZEROS / cutoff)
    phases = np.arange(up)[:, None] * down % up / up
    distance = np.arange(1 - half, half + 1)[None] - phases
    inside = np.clip(1 - (distance / half) ** 2, 0, None)
    filters = np.sinc(cutoff * distance) * np.i0(_BETA * np.sqrt(inside))
    filters /= filters.sum(1, keepdims=True)
    return filters.astype(np.float32), half
