"""Semantic segmentation: a mask for each label that an image has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.extras import import_extra
from untorch.pipeline.image import ImagePipeline
from untorch.pipeline.image_steps import read_image

__all__ = ["ImageSegmentation", "segment"]

_ROWS = 64  # that are resized at a time: logits of a large image in full size may be gigabytes


class ImageSegmentation(ImagePipeline):
    """``[{"score": None, "label": …, "mask": …}]``: masks are Pillow images, 255 where the label is the likeliest."""

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        images = [read_image(source) for source in inputs]
        logits = self.call("forward", {"pixel_values": self.pixels(images)})
        labels = self.labels(logits.shape[1])
        return [_masks(segment(row, image.size), labels) for row, image in zip(logits, images, strict=True)]


def segment(logits: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.int64]:
    """logits [labels, h, w] → the likeliest label of each pixel [height, width], where size is (width, height).

    Logits are resized bilinearly, as torch.nn.functional.interpolate does without align_corners.
    """
    width, height = size
    left, right, share = _neighbours(logits.shape[2], width)
    upper, lower, weight = _neighbours(logits.shape[1], height)
    wide = logits[:, :, left] * (1 - share) + logits[:, :, right] * share
    found = np.empty((height, width), np.int64)
    for begin in range(0, height, _ROWS):
        rows = slice(begin, begin + _ROWS)
        down = weight[rows, None]
        found[rows] = (wide[:, upper[rows]] * (1 - down) + wide[:, lower[rows]] * down).argmax(0)
    return found


def _neighbours(length: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Of each of the wanted places: the two that it lies between, and its distance from the first."""
    place = np.maximum((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * np.float32(length / wanted) - 0.5, 0)
    first = np.minimum(place.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), (place - first).astype(np.float32)


def _masks(found: NDArray[np.int64], labels: list[str]) -> list[dict[str, Any]]:
    module = import_extra("PIL.Image", "pillow", "an image")
    return [
        {"score": None, "label": labels[label], "mask": module.fromarray(((found == label) * 255).astype(np.uint8))}
        for label in np.unique(found).tolist()
    ]
