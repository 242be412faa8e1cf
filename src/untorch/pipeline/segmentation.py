"""Image segmentation: a mask for each label that an image has, or for each of its segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.detection import read_threshold
from untorch.pipeline.extras import import_extra
from untorch.pipeline.image import ImagePipeline
from untorch.pipeline.query_segmentation import (
    Segment,
    instance_segments,
    merged_instance_segments,
    panoptic_segments,
    semantic_scores,
)
from untorch.pipeline.resized_maps import bilinear_rows, resize_bilinear
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["SUBTASKS", "ImageSegmentation", "segment"]

# Of models that segment by queries. The first is what a call gets that names none.
SUBTASKS = ("panoptic", "instance", "semantic")


class ImageSegmentation(ImagePipeline):
    """``[{"score": …, "label": …, "mask": …}]``: masks are Pillow images, 255 where the label or the segment is.

    Of semantic segmentation, scores are None. Models that segment by queries take options: subtask ("panoptic",
    "instance" or "semantic"; panoptic by default), threshold (of scores, 0.9 by default), and of panoptic segmentation,
    and of OneFormer's instances, mask_threshold and overlap_mask_area_threshold (0.5 by default).
    """

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self._by_queries: bool = settings.optional("by_queries", bool) or False
        self._mask_size: int | None = settings.optional("mask_size", int)
        self._task_inputs = _read_task_inputs(settings)
        if self._by_queries:
            self.options = ("subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        subtask, thresholds = options.get("subtask") or SUBTASKS[0], _read_thresholds(options)
        if subtask not in SUBTASKS:
            raise InvalidArgumentError(f"pipeline: subtask: expected {', '.join(SUBTASKS)}, got {subtask!r:.80}")
        images = [*self.images(inputs, is_list)]
        sizes, pixels = [image.size for image in images], self.pixels(images)
        del images
        if self._by_queries:
            given = {"pixel_values": pixels}
            if self._task_inputs is not None:
                given["task_inputs"] = np.stack([self._task_inputs[subtask]] * len(pixels))
            classes, masks = self.call_all("forward", given)
            labels = self.labels(classes.shape[2] - 1)
            rows = zip(classes, map(self._enlarged, masks), sizes, strict=True)
            return [self._segments(*row, labels, subtask, thresholds) for row in rows]
        logits = self.call("forward", {"pixel_values": pixels})
        labels = self.labels(logits.shape[1])
        return [_masks(segment(row, size), labels, self.finish_mask) for row, size in zip(logits, sizes, strict=True)]

    def _enlarged(self, masks: NDArray[np.float32]) -> NDArray[np.float32]:
        """[queries, h, w], in the size in which the model's processor reads them."""
        return masks if self._mask_size is None else resize_bilinear(masks, (self._mask_size, self._mask_size))

    def _segments(
        self,
        classes: NDArray[np.float32],
        masks: NDArray[np.float32],
        size: tuple[int, int],
        labels: list[str],
        subtask: str,
        thresholds: list[float],
    ) -> list[dict[str, Any]]:
        """Of an image."""
        if subtask == "semantic":
            return _masks(segment(semantic_scores(classes, masks), size), labels, self.finish_mask)
        found: Iterable[Segment]
        if subtask == "panoptic":
            found = panoptic_segments(classes, masks, size, *thresholds)
        elif self._task_inputs is not None:
            found = merged_instance_segments(classes, masks, size, *thresholds)
        else:
            found = instance_segments(classes, masks, size, thresholds[0])
        return [
            {"score": score, "label": labels[label], "mask": self.finish_mask(_mask_image(mask))}
            for score, label, mask in found
        ]

    def finish_mask(self, mask: Any) -> Any:
        """The result's form of a mask, a Pillow image. A server puts a function here that makes a file of it."""
        return mask


def _read_task_inputs(settings: Settings) -> dict[str, NDArray[np.int64]] | None:
    """Tokens by subtask, of OneFormer, which reads them. Raises InvalidFileError."""
    found = settings.optional("task_inputs", dict)
    if found is None:
        return None
    if {*found} != {*SUBTASKS}:
        raise settings.damaged(f"task_inputs: expected {', '.join(SUBTASKS)}, got {[*found]!r:.80}")
    try:
        return {subtask: np.asarray(ids, np.int64) for subtask, ids in found.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise settings.damaged(f"task_inputs: {error}") from None


def _read_thresholds(options: Mapping[str, Any]) -> list[float]:
    defaults = {"threshold": 0.9, "mask_threshold": 0.5, "overlap_mask_area_threshold": 0.5}
    return [read_threshold(options.get(name, value), name) for name, value in defaults.items()]


def segment(logits: NDArray[np.float32], size: tuple[int, int]) -> NDArray[Any]:
    """logits [labels, h, w] → the likeliest label of each pixel [height, width], where size is (width, height).

    Logits are resized bilinearly, as torch.nn.functional.interpolate does without align_corners.
    """
    width, height = size
    found = np.empty((height, width), np.min_scalar_type(len(logits)))
    for rows, values in bilinear_rows(logits, size):
        found[rows] = values.argmax(0)
    return found


def _mask_image(mask: NDArray[np.bool_]) -> Any:
    return import_extra("PIL.Image", "pillow", "an image").fromarray((mask * 255).astype(np.uint8))


def _masks(
    found: NDArray[Any], labels: list[str], finish: Callable[[Any], Any] = lambda mask: mask
) -> list[dict[str, Any]]:
    """finish: of each mask before the next one is made, as those of a large image need much memory together."""
    return [
        {"score": None, "label": labels[label], "mask": finish(_mask_image(found == label))}
        for label in np.unique(found).tolist()
    ]
