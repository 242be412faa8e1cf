"""Maps of scores in an image's size, as torch.nn.functional.interpolate resizes them without align_corners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bilinear_rows", "nearest_indices", "resize_bilinear"]

_ROWS = 64  # that are resized at a time: maps of a large image in full size may be gigabytes


def bilinear_rows(maps: NDArray[np.float32], size: tuple[int, int]) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """maps [channels, h, w] → some rows of the result and their values [channels, rows, width].

    size: (width, height).
    """
    width, height = size
    left, right, share = _neighbours(maps.shape[2], width)
    upper, lower, weight = _neighbours(maps.shape[1], height)
    wide = maps[:, :, left] * (1 - share) + maps[:, :, right] * share
    for begin in range(0, height, _ROWS):
        rows = slice(begin, begin + _ROWS)
        down = weight[rows, None]
        values: NDArray[Any] = wide[:, upper[rows]] * (1 - down) + wide[:, lower[rows]] * down
        yield rows, values


def resize_bilinear(maps: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """maps [channels, h, w] → [channels, height, width], where size is (width, height)."""
    return np.concatenate([values for _, values in bilinear_rows(maps, size)], 1)


def nearest_indices(length: int, wanted: int) -> NDArray[np.int64]:
    """Which of ``length`` values each of the wanted places takes."""
    scale = np.float32(length) / np.float32(wanted)
    found = (np.arange(wanted, dtype=np.float32) * scale).astype(np.int64)
    return np.minimum(found, length - 1).astype(np.int64)


def _neighbours(length: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Of each of the wanted places: the two that it lies between, and its distance from the first."""
    place = np.maximum((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * np.float32(length / wanted) - 0.5, 0)
    first = np.minimum(place.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), (place - first).astype(np.float32)
