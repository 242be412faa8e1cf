"""Audio classification: what is refused, and which input of a list it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.pipeline.audio import AudioClassification
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidArgumentError

SOUND = np.sin(np.arange(800) / 5).astype(np.float32)


def make() -> Any:
    pipeline: Any = AudioClassification.__new__(AudioClassification)
    values = {
        "sampling_rate": 8000, "min_samples": 10, "max_samples": 8000, "normalize": False, "activation": "softmax",
        "labels": ["quiet", "loud"],
    }  # fmt: skip
    pipeline.task, pipeline.settings = "audio-classification", Settings(values, "m.pt2")
    pipeline.call = lambda method, arguments: np.abs(arguments["input_values"]).mean(1, keepdims=True) * [[0.0, 1.0]]
    return pipeline


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.zeros(9, np.float32), "pipeline: inputs: expected 10 to 8000 samples at 8000 Hz, got 9"),
        ([SOUND, SOUND[:1]], "pipeline: inputs[1]: expected 10 to 8000 samples at 8000 Hz, got 1"),
        ([SOUND, SOUND * np.nan], "pipeline: inputs[1]: audio: expected finite samples, got NaN or infinity"),
        (
            [SOUND] * 9 + [None],
            "pipeline: inputs[9]: audio: expected a path, bytes, a binary file or an array, got None",
        ),
    ],
)
def test_refusals(given: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()(given)
    assert str(caught.value).startswith(text)


def test_lists() -> None:
    assert make()([]) == []
    assert [row[0]["label"] for row in make()([SOUND, SOUND.astype(np.float64)])] == ["loud", "loud"]
    assert make()(SOUND, sampling_rate=8000.0) == make()(SOUND)
