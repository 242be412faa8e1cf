"""What an image encoder reads beside the patches, from the image's size alone: places of patches, and windows.

The encoder is compiled for any number of units; whatever depends on rows and columns is an input that is made here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.vision.settings import VisionSettings

__all__ = ["encoder_tables"]


def encoder_tables(rows: int, columns: int, settings: VisionSettings) -> list[NDArray[Any]]:
    """The encoder's arguments behind the patches, for an image of that many units.

    "axes": rows and columns of the patches [units, merge_size², 2]. "position_grid": four places in the square of
    learned positions and their weights [units, merge_size², 4]. "windows": the units in the order of windows [units],
    the patches of each window [windows, most of one], which of these are real, and each patch's place among them
    [units, merge_size²].
    """
    found: list[NDArray[Any]] = []
    merge = settings.merge_size
    row, column = _places(rows, columns, merge)
    for name in settings.tables:
        if name == "axes":
            found.append(np.stack([row, column], axis=-1))
        elif name == "position_grid":
            found += _position_grid(row, column, rows * merge, columns * merge, settings.grid_side)
        else:
            found += _windows(rows, columns, settings.window_side, merge * merge)
    return found


def _places(rows: int, columns: int, merge: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch [units, merge²]."""
    grid = np.indices((rows * merge, columns * merge)).reshape(2, rows, merge, columns, merge)
    row, column = grid.transpose(0, 1, 3, 2, 4).reshape(2, rows * columns, merge * merge)
    return row, column


def _position_grid(
    row: NDArray[np.int64], column: NDArray[np.int64], height: int, width: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Bilinear interpolation whose corners are those of the grid."""
    taps, weights = [], []
    for place, size in ((row, height), (column, width)):
        at = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(at)
        first = low.astype(np.int64)
        taps.append(np.stack([first, np.minimum(first + 1, side - 1)], axis=-1))
        weights.append(np.stack([1 - (at - low), at - low], axis=-1))
    shape = (*row.shape, 4)
    indices = (taps[0][..., :, None] * side + taps[1][..., None, :]).reshape(shape)
    return indices, (weights[0][..., :, None] * weights[1][..., None, :]).reshape(shape).astype(np.float32)


def _windows(rows: int, columns: int, side: int, patches: int) -> tuple[NDArray[Any], ...]:
    """Windows of side × side units, smaller at the right and bottom. patches: of a unit."""
    row, column = np.indices((rows, columns))
    of = ((row // side) * -(-columns // side) + column // side).reshape(-1)  # the window of each unit
    order = np.argsort(of, kind="stable")
    lengths = np.bincount(of) * patches
    begins = np.cumsum(lengths) - lengths
    most = side * side * patches
    places = np.arange(most)
    is_real = places < lengths[:, None]
    index = np.where(is_real, begins[:, None] + places, begins[:, None])
    # The windows' patches are one behind the other, in the order of the units.
    window = np.repeat(np.arange(len(lengths)), lengths)
    inverse = window * most + np.arange(len(window)) - begins[window]
    return order, index, is_real, inverse.reshape(rows * columns, patches)
