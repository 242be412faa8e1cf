"""Object detection: boxes of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.pipeline.detection import ObjectDetection, read_threshold
from untorch.pipeline.settings import read_settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

pytest.importorskip("PIL")


class Program:
    """Two queries: a cat in the right half, and nothing."""

    path = "m.pt2"

    def __getitem__(self, name: str) -> Any:
        assert name == "forward"
        return self.detect

    def detect(self, pixel_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert pixel_values.shape == (1, 3, 16, 32)
        logits = np.array([[[0.0, 5.0, 0.0], [0.0, 0.0, 5.0]]], np.float32)
        return logits, np.array([[[0.75, 0.5, 0.5, 1.0], [0.5, 0.5, 1.0, 1.0]]], np.float32)


def make(labels: list[str], **fields: Any) -> ObjectDetection:
    section = {
        "format_version": 1, "task": "object-detection", "architecture": "YolosForObjectDetection", "labels": labels,
        "image_steps": [["resize_edges", 20, 40, 16, 2]], **fields,
    }  # fmt: skip
    return ObjectDetection(Program(), read_settings({"pipeline": section}, "m.pt2"), False)  # type: ignore[arg-type]


def test_boxes_are_in_the_pixels_of_the_image() -> None:
    image = np.zeros((20, 41, 3), np.uint8)
    (found,) = make(["dog", "cat"])(image)
    assert found["label"] == "cat"
    assert found["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 2))
    assert found["box"] == {"xmin": 20, "ymin": 0, "xmax": 41, "ymax": 20}


def test_the_threshold() -> None:
    pipeline, image = make(["dog", "cat", "no object"]), np.zeros((20, 41, 3), np.uint8)
    assert pipeline([image], threshold=1.0) == [[]]
    assert [one["label"] for one in pipeline(image, threshold=0)] == ["cat", "dog"]
    assert read_threshold(1) == 1.0
    for value in (True, "0.5", 1.5, float("nan")):
        with pytest.raises(InvalidArgumentError, match="threshold: expected a number from 0 to 1, got"):
            pipeline(image, threshold=value)


def test_sigmoids_rank_pairs_of_query_and_label() -> None:
    image = np.zeros((20, 41, 3), np.uint8)
    pipeline = make(["dog", "cat", "bird"], activation="sigmoid")
    found = pipeline(image)
    assert [one["label"] for one in found] == ["cat", "bird"], "as many as queries, the best first"
    assert [one["score"] for one in found] == pytest.approx([1 / (1 + np.exp(-5))] * 2)
    assert [one["box"]["xmin"] for one in found] == [20, 0], "each with its query's box"
    assert pipeline(image, threshold=1.0) == []


def test_the_number_of_candidates() -> None:
    """Of Conditional DETR and DAB-DETR, whatever the number of queries is."""
    image = np.zeros((20, 41, 3), np.uint8)
    names = ["dog", "cat", "bird"]
    found = make(names, activation="sigmoid", candidates=100)(image, threshold=0.2)
    assert [one["label"] for one in found] == ["cat", "bird", "dog", "bird", "dog", "cat"]
    assert len(make(names, activation="sigmoid", candidates=3)(image, threshold=0.2)) == 3
    with pytest.raises(InvalidFileError, match="candidates: expected int, got '3'"):
        make(names, activation="sigmoid", candidates="3")(image)


def test_refusals() -> None:
    image = np.zeros((20, 41, 3), np.uint8)
    with pytest.raises(InvalidFileError, match="labels: expected 2, got 1"):
        make(["dog"])(image)
    with pytest.raises(InvalidFileError, match="labels: expected 3, got 2"):
        make(["dog", "cat"], activation="sigmoid")(image)
    with pytest.raises(InvalidFileError, match="activation: expected softmax or sigmoid, got 'tanh'"):
        make(["dog", "cat"], activation="tanh")(image)
    with pytest.raises(ArgumentTypeError, match="unknown option 'top_k': object-detection takes batch_size, thresh"):
        make(["dog", "cat"])(image, top_k=1)


def test_images_that_are_too_long() -> None:
    """The program says what it takes; the pipeline says which image it was."""
    pipeline = make(["dog", "cat"])

    def detect(pixel_values: np.ndarray) -> Any:
        if pixel_values.shape[2:] != (16, 32):
            raise InvalidArgumentError("dimension 3 (width) must be from 32 to 32")
        return Program().detect(pixel_values)

    pipeline.program = {"forward": detect}  # type: ignore[assignment]
    fine, tall = np.zeros((20, 41, 3), np.uint8), np.zeros((2000, 1, 3), np.uint8)
    text = (
        "expected an image that the model takes, got 1 × 2000, resized to 16 × 32: crop or pad it (dimension 3 (width) "
        "must be from 32 to 32)"
    )
    for given, place in ((tall, "inputs"), ([fine, tall], "inputs[1]"), ([fine] * 8 + [tall], "inputs[8]")):
        with pytest.raises(InvalidArgumentError) as caught:
            pipeline(given)
        assert str(caught.value) == f"pipeline: {place}: {text}"
