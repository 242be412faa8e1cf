"""Images as a model's input: resize, crop, rescale and normalise, as the steps that the package lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch import images

__all__ = ["apply_steps", "read_image"]


def read_image(source: Any, *, max_pixels: int | None = None, formats: Sequence[str] | None = None) -> Any:
    """As ``untorch.images.read_image``."""
    return images.read_image(source, "pipeline: inputs", "pipeline", max_pixels=max_pixels, formats=formats)


def apply_steps(image: Any, steps: Sequence[Sequence[Any]]) -> NDArray[np.float32]:
    """[3, height, width], float32. A step is a name and its arguments:

    ["resize", height, width, filter], ["resize_shortest", size, filter], ["resize_edges", shortest, longest, multiple,
    filter], ["center_crop", height, width], ["center_crop_even", height, width], ["rescale", factor], ["normalize",
    means, deviations]. Filters are Pillow's numbers.

    Raises ValueError, TypeError for steps that are damaged.
    """
    # Pillow works on bytes: what comes first stays an image, the rest is an array.
    array: NDArray[Any] | None = None
    for name, *arguments in steps:
        if name == "resize":
            height, width, resample = arguments
            image = image.resize((width, height), resample)
        elif name == "resize_shortest":
            size, resample = arguments
            image = image.resize(_scaled(image.size, size), resample)
        elif name == "resize_edges":
            shortest, longest, multiple, resample = arguments
            image = image.resize(_within(image.size, shortest, longest, multiple), resample)
        elif name == "center_crop":
            image = _center_crop(image, *arguments)
        elif name == "center_crop_even":
            image = _center_crop_even(image, *arguments)
        elif name == "rescale":
            array = np.asarray(image, np.float32) * np.float32(arguments[0])
        elif name == "normalize":
            array = np.asarray(image, np.float32) if array is None else array
            array = (array - np.asarray(arguments[0], np.float32)) / np.asarray(arguments[1], np.float32)
        else:
            raise ValueError(f"unknown step {name!r:.80}")
    found = np.asarray(image, np.float32) if array is None else array
    return np.ascontiguousarray(found.transpose(2, 0, 1), np.float32)


def _scaled(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    """Width and height with the aspect ratio of ``size``."""
    width, height = size
    if width <= height:
        return shortest, int(shortest * height / width)
    return int(shortest * width / height), shortest


def _within(size: tuple[int, int], shortest: int, longest: int, multiple: int) -> tuple[int, int]:
    """Width and height: the shorter side has that size, or less where the longer one would exceed its own.

    Both are rounded down to a multiple.
    """
    short, long = min(size), max(size)
    wanted: float = shortest
    if long / short * shortest > longest:
        wanted = longest * short / long
    # An image of that size stays as it is; YOLOS' processor rounds the longer side of an upright one again.
    if short == round(wanted) and (multiple == 1 or size[0] >= size[1]):
        found = size
    else:
        other = int(wanted * long / short)
        found = (round(wanted), other) if size[0] < size[1] else (other, round(wanted))
    return max(found[0] // multiple, 1) * multiple, max(found[1] // multiple, 1) * multiple


def _center_crop_even(image: Any, height: int, width: int) -> Any:
    """As torchvision has it: half a pixel is rounded to the even one."""
    left, top = round((image.size[0] - width) / 2), round((image.size[1] - height) / 2)
    return image.crop((left, top, left + width, top + height))


def _center_crop(image: Any, height: int, width: int) -> Any:
    """What is outside of the image is black."""
    # Floor for a crop, and for padding one pixel more at the top and left where the rest is odd.
    left, top = (image.size[0] - width) // 2, (image.size[1] - height) // 2
    return image.crop((left, top, left + width, top + height))
