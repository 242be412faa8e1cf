"""Segmentation by queries: segments equal to those of transformers' image processors, and options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import recipe_models
from untorch.pipeline.query_segmentation import (
    instance_segments,
    merged_instance_segments,
    panoptic_segments,
    semantic_scores,
)
from untorch.pipeline.segmentation import SUBTASKS, ImageSegmentation, segment
from untorch.pipeline.settings import read_settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

pytest.importorskip("PIL")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SIZE = (90, 61)
SIDES = {"MaskFormer": None, "Mask2Former": 384, "OneFormer": None}


# With as many labels torch.topk sorts what it finds, though transformers does not ask for it.
def make_logits(seed: int, labels: int = 66) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    classes = rng.normal(0, 1, (6, labels + 1)).astype(np.float32)
    classes[np.arange(6), rng.integers(0, labels, 6)] += np.array([9, 7, 6, 5, 9, 1], np.float32)
    classes[4] = 0
    classes[4, -1] = 9  # no object
    return classes, rng.normal(0, 4, (6, 12, 16)).astype(np.float32)


def make(labels: list[str], **fields: Any) -> ImageSegmentation:
    """Of a program that finds the first label in the left half and the last one in the right half."""

    def forward(pixel_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        classes, masks = (
            np.zeros((len(pixel_values), 2, 3), np.float32),
            np.zeros((len(pixel_values), 2, 4, 4), np.float32),
        )
        classes[:, 0, 0], classes[:, 1, 1] = 9, 6
        masks[:, 0], masks[:, 1] = [[9, 9, -9, -9]] * 4, [[-9, -9, 9, 9]] * 4
        return classes, masks

    section = {
        "format_version": 1, "task": "image-segmentation", "architecture": "MaskFormerForInstanceSegmentation",
        "labels": labels, "image_steps": [["resize", 16, 16, 2]], "by_queries": True, **fields,
    }  # fmt: skip
    program: Any = {"forward": forward}
    return ImageSegmentation(program, read_settings({"pipeline": section}, "m.pt2"), False)


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("subtask", ["panoptic", "instance", "semantic"])
def test_segments_equal_those_of_transformers(kind: str, subtask: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{kind}ImageProcessorPil")()
    if kind == "OneFormer":
        recipe_models.resize_without_torchvision()
        processor.class_info_file = ""  # which it reads, though not for this
    read = getattr(processor, f"post_process_{subtask}_segmentation")
    pipeline, counts = make(["a", "b"], mask_size=SIDES[kind]), set()
    for seed in range(4):
        classes, masks = make_logits(seed)
        outputs = SimpleNamespace(
            class_queries_logits=torch.from_numpy(classes)[None], masks_queries_logits=torch.from_numpy(masks)[None]
        )
        enlarged = pipeline._enlarged(masks)
        if subtask == "semantic":
            wanted = read(outputs, target_sizes=[SIZE[::-1]])[0].numpy()
            assert (segment(semantic_scores(classes, enlarged), SIZE) == wanted).mean() > 0.999
            continue
        thresholds = {"threshold": 0.4, "mask_threshold": 0.5, "overlap_mask_area_threshold": 0.2}
        expected = read(outputs, **thresholds, target_sizes=[SIZE[::-1]])[0]
        if subtask == "panoptic":
            found = [*panoptic_segments(classes, enlarged, SIZE, *thresholds.values())]
        elif kind == "OneFormer":
            found = [*merged_instance_segments(classes, enlarged, SIZE, *thresholds.values())]
        else:
            found = [*instance_segments(classes, enlarged, SIZE, 0.4)]
        assert [label for _, label, _ in found] == [one["label_id"] for one in expected["segments_info"]]
        for (score, _, mask), one in zip(found, expected["segments_info"], strict=True):
            assert score == pytest.approx(one["score"], abs=2e-6)
            assert (mask == (expected["segmentation"] == one["id"]).numpy()).mean() > 0.999
        counts.add(len(found))
    assert subtask == "semantic" or max(counts) > 1


@pytest.mark.parametrize("subtask", [None, "panoptic", "instance", "semantic"])
def test_a_mask_for_each_segment(subtask: str | None) -> None:
    image = np.zeros((20, 40, 3), np.uint8)
    found = make(["cat", "dog"])([image, image], subtask=subtask)
    assert [len(one) for one in found] == [2, 2]
    for index, one in enumerate(found[0]):
        assert one["label"] == ["cat", "dog"][index]
        assert one["mask"].mode == "L"
        assert one["mask"].size == (40, 20)
        mask = np.asarray(one["mask"])
        assert (mask[:, :18] == 255 * (index == 0)).all()
        assert (mask[:, 22:] == 255 * (index == 1)).all()
        if subtask == "semantic":
            assert one["score"] is None
        else:
            assert one["score"] == pytest.approx([1, 0.995][index], abs=1e-3)


def test_the_model_reads_the_subtask() -> None:
    tokens = {"panoptic": [1, 2, 0], "instance": [1, 3, 0], "semantic": [1, 4, 5]}
    pipeline, image = make(["cat", "dog"], task_inputs=tokens), np.zeros((20, 40, 3), np.uint8)
    forward, given = pipeline.program["forward"], []

    def invoke(method: str, arguments: Any) -> list[Any]:
        given.append(arguments["task_inputs"])
        return [*forward(arguments["pixel_values"])]  # type: ignore[misc]

    pipeline.invoke = invoke  # type: ignore[method-assign]
    for subtask in (None, *tokens):
        assert [len(one) for one in pipeline([image, image], subtask=subtask)] == [2, 2]
        assert given[-1].dtype == np.int64
        assert given[-1].tolist() == [tokens[subtask or "panoptic"]] * 2


def test_thresholds() -> None:
    pipeline, image = make(["cat", "dog"]), np.zeros((20, 40, 3), np.uint8)
    for subtask in ("panoptic", "instance"):
        assert [one["label"] for one in pipeline(image, subtask=subtask, threshold=0.998)] == ["cat"]
        assert pipeline(image, subtask=subtask, threshold=1) == []
    assert pipeline(image, overlap_mask_area_threshold=1) == []


def test_refusals() -> None:
    image = np.zeros((20, 40, 3), np.uint8)
    with pytest.raises(InvalidArgumentError, match="subtask: expected panoptic, instance, semantic, got 'parts'"):
        make(["cat", "dog"])(image, subtask="parts")
    with pytest.raises(InvalidArgumentError, match="mask_threshold: expected a number from 0 to 1, got 2"):
        make(["cat", "dog"])(image, mask_threshold=2)
    with pytest.raises(InvalidFileError, match=r"task_inputs: expected panoptic, instance, semantic, got \['parts'\]"):
        make(["cat", "dog"], task_inputs={"parts": [1]})
    with pytest.raises(InvalidFileError, match="damaged: task_inputs: invalid literal"):
        make(["cat", "dog"], task_inputs={key: ["a"] for key in SUBTASKS})
    with pytest.raises(InvalidFileError, match="labels: expected 2, got 1"):
        make(["cat"])(image)
    with pytest.raises(ArgumentTypeError, match="unknown option 'subtask': image-segmentation takes batch_size"):
        make(["cat", "dog"], by_queries=False)(image, subtask="semantic")
