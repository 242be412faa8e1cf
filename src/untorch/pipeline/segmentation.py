"""Semantic segmentation: a mask for each label that an image has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        sizes, pixels = [image.size for image in images], self.pixels(images)
        del images
        logits = self.call("forward", {"pixel_values": pixels})
        labels = self.labels(logits.shape[1])
        return [_masks(segment(row, size), labels, self.finish_mask) for row, size in zip(logits, sizes, strict=True)]

    def finish_mask(self, mask: Any) -> Any:
        """The result's form of a mask, a Pillow image. A server puts a function here that makes a file of it."""
        return mask


def segment(logits: NDArray[np.float32], size: tuple[int, int]) -> NDArray[Any]:
    """logits [labels, h, w] → the likeliest label of each pixel [height, width], where size is (width, height).

    Logits are resized bilinearly, as torch.nn.functional.interpolate does without align_corners.
    """
    width, height = size
    left, right, share = _neighbours(logits.shape[2], width)
    upper, lower, weight = _neighbours(logits.shape[1], height)
    wide = logits[:, :, left] * (1 - share) + logits[:, :, right] * share
    found = np.empty((height, width), np.min_scalar_type(len(logits)))
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


def _masks(
    found: NDArray[Any], labels: list[str], finish: Callable[[Any], Any] = lambda mask: mask
) -> list[dict[str, Any]]:
    """finish: of each mask before the next one is made, as those of a large image need much memory together."""
    module = import_extra("PIL.Image", "pillow", "an image")
    return [
        {
            "score": None, "label": labels[label],
            "mask": finish(module.fromarray(((found == label) * 255).astype(np.uint8))),
        }
        for label in np.unique(found).tolist()
    ]  # fmt: skip
