"""An image as patches: resized to whole units, rescaled, normalised, and cut in the order of the encoder's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.vision.settings import VisionSettings
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Patches", "cut_patches", "fit_size"]

_MOST_RATIO = 200


@dataclass(frozen=True)
class Patches:
    """pixels: [units, merge_size², values of a patch], float32. rows, columns: of units."""

    pixels: NDArray[np.float32]
    rows: int
    columns: int


def fit_size(height: int, width: int, settings: VisionSettings) -> tuple[int, int]:
    """Height and width in whole units, within the bounds of pixels, near to the image's own ratio.

    Raises InvalidArgumentError for an image that is too long.
    """
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise InvalidArgumentError(
            f"prompt: images: expected sides of a ratio up to {_MOST_RATIO}, got an image of {height} × {width} pixels"
        )
    unit, pixels = settings.unit, height * width
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit * unit > settings.max_pixels:
        scale = math.sqrt(pixels / settings.max_pixels)
        rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
    elif rows * columns * unit * unit < settings.min_pixels:
        scale = math.sqrt(settings.min_pixels / pixels)
        rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
    return rows * unit, columns * unit


def cut_patches(image: Any, settings: VisionSettings) -> Patches:
    """Of a Pillow image, RGB. The patches of a unit come one after the other, the units by rows."""
    height, width = fit_size(image.height, image.width, settings)
    resized = image.resize((width, height), settings.resample)
    mean, deviation = np.asarray(settings.mean, np.float32), np.asarray(settings.deviation, np.float32)
    values: NDArray[np.float32] = (np.asarray(resized, np.float32) * np.float32(settings.rescale) - mean) / deviation
    patch, merge, frames = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    rows, columns = height // settings.unit, width // settings.unit
    # [row, patch row, pixel row, column, patch column, pixel column, channel]
    parts = values.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.repeat(parts[:, :, :, :, :, None], frames, axis=5)
    return Patches(repeated.reshape(rows * columns, merge * merge, 3 * frames * patch * patch), rows, columns)
