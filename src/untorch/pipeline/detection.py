"""Object detection: boxes with labels and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.image import ImagePipeline
from untorch.pipeline.image_steps import read_image
from untorch.pipeline.scores import softmax
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ObjectDetection"]


class ObjectDetection(ImagePipeline):
    """``[{"score": …, "label": …, "box": {"xmin", "ymin", "xmax", "ymax"}}]`` of an image, boxes in its pixels.

    threshold: lower scores are left out; 0.5 by default.
    """

    options = ("threshold",)

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class. An image is a call: images that keep their aspect ratio do not fit into one array."""
        threshold = read_threshold(options.get("threshold", 0.5))
        found = []
        for source in inputs:
            image = read_image(source)
            size, pixels = image.size, self.pixels([image])
            del image, source  # which may be far larger than the model's input
            logits, boxes = self.call_all("forward", {"pixel_values": pixels})
            found.append(self._objects(logits[0], boxes[0], size, threshold))
        return found

    def _objects(
        self, logits: NDArray[Any], boxes: NDArray[Any], size: tuple[int, int], threshold: float
    ) -> list[dict[str, Any]]:
        """logits [queries, labels + 1], the last for no object; boxes [queries, 4] as centre, width and height."""
        scores = softmax(logits)[:, :-1]
        labels = self._labels(logits.shape[1] - 1)
        centre, half = boxes[:, :2], boxes[:, 2:] / 2
        corners = np.concatenate([centre - half, centre + half], 1) * np.asarray([*size, *size], np.float32)
        best, objects = scores.argmax(1), []
        for query in np.flatnonzero(scores.max(1) > threshold):
            # Towards zero, as transformers does.
            xmin, ymin, xmax, ymax = (int(value) for value in corners[query])
            objects.append(
                {
                    "score": float(scores[query].max()), "label": labels[best[query]],
                    "box": {"xmin": xmin, "ymin": ymin, "xmax": xmax, "ymax": ymax},
                }
            )  # fmt: skip
        return objects

    def _labels(self, width: int) -> list[str]:
        """Some configs name the class for no object, too."""
        labels = self.settings.texts("labels")
        if len(labels) not in (width, width + 1):
            raise self.settings.damaged(f"labels: expected {width}, got {len(labels)}")
        return labels


def read_threshold(value: Any) -> float:
    """From 0 to 1. Raises InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidArgumentError(f"pipeline: threshold: expected a number from 0 to 1, got {value!r:.80}")
    return float(value)
