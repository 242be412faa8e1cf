"""Class to image: labels, their names and numbers, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from untorch.pipeline.class_to_image import ClassToImage
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

SECTION = {
    "task": "class-to-image", "architecture": "DiTPipeline", "labels": ["tench, Tinca tinca", "goldfish"], "no_class": 4,
    "guidance": "classifier-free", "guidance_scale": 4.0, "num_inference_steps": 2, "latent_shape": [1, 2, 2],
    "schedule": {"kind": "flow", "count": 4, "shift": 1.0, "smallest": None},
}  # fmt: skip


class Recorded(ClassToImage):
    """Keeps the classes that the denoiser was called with."""

    classes: list[list[int]]

    def invoke(self, method: str, arguments: Any) -> list[Any]:
        if method == "decode":
            return [np.zeros((1, 3, 4, 4), np.float32)]
        self.classes.append(arguments["class_labels"].tolist())
        assert arguments["class_labels"].dtype == np.int64 and len(arguments["latents"]) == len(self.classes[-1])
        return [np.zeros_like(arguments["latents"])]


def make(**fields: Any) -> Recorded:
    program: Any = SimpleNamespace(path="m.pt2")
    pipeline = Recorded(program, Settings({**SECTION, **fields}, "m.pt2"), False)
    pipeline.classes = []
    return pipeline


@pytest.mark.parametrize(
    ("given", "number"),
    [("goldfish", 1), ("tench", 0), ("Tinca tinca", 0), ("tench, Tinca tinca", 0), (3, 3), (np.int64(2), 2), ("2", 2)],
)
def test_labels_and_numbers(given: Any, number: int) -> None:
    pipeline = make()
    image = pipeline(given, output_type="np")
    assert image.shape == (4, 4, 3) and pipeline.classes == [[4, number]] * 2
    pipeline = make()
    pipeline(given, output_type="np", guidance_scale=1.0, num_inference_steps=1)
    assert pipeline.classes == [[number]]


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ("goldfisch", InvalidArgumentError, "expected a label of the model, got 'goldfisch'; did you mean 'goldfish'?"),
        ("xylophone", InvalidArgumentError, "expected a label of the model, got 'xylophone'"),
        (4, InvalidArgumentError, "expected a label's number from 0 to 3, got 4"),
        ("-1", InvalidArgumentError, "expected a label of the model, got '-1'"),
        (-1, InvalidArgumentError, "expected a label's number from 0 to 3, got -1"),
        (1.0, ArgumentTypeError, "expected a label or its number, got float"),
        (True, ArgumentTypeError, "expected a label or its number, got bool"),
    ],
)
def test_inputs_that_are_refused(given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        make()(given)
    assert str(caught.value) == f"pipeline: inputs: {text}"


def test_sections_that_are_damaged() -> None:
    with pytest.raises(
        InvalidFileError, match="m.pt2: the manifest's pipeline is damaged: labels: expected at most 1, g"
    ):
        make(no_class=1)
    with pytest.raises(InvalidFileError, match="guidance: expected classifier-free or embedded or none, got 'much'"):
        make(guidance="much")


def test_options() -> None:
    with pytest.raises(ArgumentTypeError, match="unknown option 'negative_prompt'"):
        make()("tench", negative_prompt="a dog")
