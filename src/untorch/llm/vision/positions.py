"""Multimodal rotary positions (M-RoPE): time, height and width of each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["image_positions"]


def image_positions(length: int, images: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    """[3, length]: of a prompt with images at (first token, rows of units, columns of units).

    The tokens of an image have one time, and their row and column behind it; what follows goes on behind the longer
    side (Qwen2-VL, section 2.1).
    """
    found = np.empty((3, length), np.int64)
    place = position = 0
    for begin, rows, columns in images:
        text = begin - place
        found[:, place:begin] = np.arange(position, position + text)
        position += text
        row, column = np.indices((rows, columns)).reshape(2, -1)
        place = begin + rows * columns
        found[:, begin:place] = position + np.stack([np.zeros_like(row), row, column])
        position += max(rows, columns)
    found[:, place:] = np.arange(position, position + length - place)
    return found
