"""Object detection: boxes with labels and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.base import numbered
from untorch.pipeline.image import ImagePipeline
from untorch.pipeline.scores import sigmoid, softmax
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
        for index, image in enumerate(self.images(inputs, is_list)):
            size, pixels = image.size, self.pixels([image])
            del image  # which may be far larger than the model's input
            with numbered(index if is_list else None):
                logits, boxes = self._detect(pixels, size)
            found.append(self._objects(logits[0], boxes[0], size, threshold))
        return found

    def _detect(self, pixels: NDArray[np.float32], size: tuple[int, int]) -> list[NDArray[np.float32]]:
        """Raises InvalidArgumentError for an image that is too long for the model: the shorter side gets too short."""
        try:
            return self.call_all("forward", {"pixel_values": pixels})
        except InvalidArgumentError as error:
            height, width = pixels.shape[2:]
            raise InvalidArgumentError(
                f"pipeline: inputs: expected an image that the model takes, got {size[0]} × {size[1]}, resized to "
                f"{width} × {height}: crop or pad it ({error})"
            ) from error

    def _objects(
        self, logits: NDArray[Any], boxes: NDArray[Any], size: tuple[int, int], threshold: float
    ) -> list[dict[str, Any]]:
        """logits [queries, classes]; bounding boxes [queries, 4] as centre, width and height."""
        activation = self.settings.optional("activation", str) or "softmax"
        if activation not in _SELECTIONS:
            raise self.settings.damaged(f"activation: expected {' or '.join(_SELECTIONS)}, got {activation!r:.80}")
        candidates = self.settings.optional("candidates", int)
        scores, best, queries = _SELECTIONS[activation](logits, candidates or len(logits))
        labels = self._labels(logits.shape[1], has_no_object=activation == "softmax")
        centre, half = boxes[:, :2], boxes[:, 2:] / 2
        corners = np.concatenate([centre - half, centre + half], 1) * np.asarray([*size, *size], np.float32)
        objects = []
        for index in np.flatnonzero(scores > threshold):
            # Towards zero, as transformers does.
            xmin, ymin, xmax, ymax = (int(value) for value in corners[queries[index]])
            objects.append(
                {
                    "score": float(scores[index]), "label": labels[best[index]],
                    "box": {"xmin": xmin, "ymin": ymin, "xmax": xmax, "ymax": ymax},
                }
            )  # fmt: skip
        return objects

    def _labels(self, classes: int, has_no_object: bool) -> list[str]:
        """Of the classes, the last may be none. Some configs name the class for no object, too."""
        labels, width = self.settings.texts("labels"), classes - has_no_object
        if len(labels) not in (width, classes):
            raise self.settings.damaged(f"labels: expected {width}, got {len(labels)}")
        return labels


# Scores, labels and queries of the candidates.
_Candidates = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _likeliest_labels(logits: NDArray[Any], _: int) -> _Candidates:
    """A softmax over the classes, the last of which is for no object: a candidate a query, in their order."""
    scores = softmax(logits)[:, :-1]
    return scores.max(1), scores.argmax(1), np.arange(len(scores))


def _likeliest_pairs(logits: NDArray[Any], count: int) -> _Candidates:
    """A sigmoid for each class: the best pairs of a query and a label, the best first."""
    scores = sigmoid(logits).reshape(-1)
    order = np.argsort(-scores, kind="stable")[:count]
    return scores[order], order % logits.shape[1], order // logits.shape[1]


_SELECTIONS: dict[str, Callable[[NDArray[Any], int], _Candidates]] = {
    "softmax": _likeliest_labels,
    "sigmoid": _likeliest_pairs,
}


def read_threshold(value: Any, name: str = "threshold") -> float:
    """From 0 to 1. Raises InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidArgumentError(f"pipeline: {name}: expected a number from 0 to 1, got {value!r:.80}")
    return float(value)
