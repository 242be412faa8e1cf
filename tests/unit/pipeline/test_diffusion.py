"""Text to image: options that are refused. tests/conformance/test_diffusion.py compares its pixels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from untorch.pipeline.settings import Settings
from untorch.pipeline.text_to_image import TextToImage
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

SECTION = {"schedule": {"kind": "flow", "count": 4, "shift": 1.0, "smallest": None}}


def make(guidance: str = "classifier-free") -> Any:
    pipeline: Any = TextToImage.__new__(TextToImage)
    pipeline.task, pipeline.architecture, pipeline.settings = (
        "text-to-image",
        "FluxPipeline",
        Settings(SECTION, "m.pt2"),
    )
    pipeline._scale, pipeline._steps, pipeline._guidance = 7.5, 4, guidance
    pipeline._shape = (1, 2, 2)
    return pipeline


def test_options_that_a_distilled_model_does_not_read() -> None:
    for guidance, name, value in (
        ("embedded", "negative_prompt", "a dog"),
        ("none", "negative_prompt", ""),
        ("none", "guidance_scale", 2),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            make(guidance)("a cat", **{name: value})
        assert str(caught.value) == (
            f"pipeline: {name}: expected none, as this FluxPipeline was distilled to do without: leave it out"
        )


def test_steps_that_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="^pipeline: num_inference_steps: expected at most 4, got 5$"):
        make()("a cat", num_inference_steps=5)
    pipeline = make()
    pipeline.settings = Settings(
        {"schedule": {"kind": "pndm", "alphas": [0.5] * 9, "spacing": "leading", "offset": 1}}, "m.pt2"
    )
    with pytest.raises(InvalidArgumentError, match="^pipeline: num_inference_steps: expected at least 4, got 3$"):
        pipeline("a cat", num_inference_steps=3)
    with pytest.raises(InvalidArgumentError, match="^pipeline: num_inference_steps: expected at most 8, got 9$"):
        pipeline("a cat", num_inference_steps=9)
    pipeline.settings = Settings({"schedule": {**SECTION["schedule"], "shift": -1.0}}, "m.pt2")
    with pytest.raises(
        InvalidFileError, match="m.pt2: the manifest's pipeline is damaged: schedule: expected 1 to 4 st"
    ):
        pipeline("a cat", num_inference_steps=2)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"seed": "one"}, InvalidArgumentError, "seed: expected an integer from 0, got 'one'"),
        ({"seed": 1.5}, InvalidArgumentError, "seed: expected an integer from 0, got 1.5"),
        ({"seed": -1}, InvalidArgumentError, "seed: expected an integer from 0, got -1"),
        ({"negative_prompt": 3}, ArgumentTypeError, "negative_prompt: expected a string, got int 3"),
        ({"negative_prompt": ["a"]}, ArgumentTypeError, "negative_prompt: expected a string, got list ['a']"),
        ({"guidance_scale": np.nan}, InvalidArgumentError, "guidance_scale: expected a number, got nan"),
        ({"output_type": "latent"}, InvalidArgumentError, "output_type: expected pil or np, got 'latent'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        make()("a cat", **options)
    assert str(caught.value) == f"pipeline: {text}"


def test_texts_that_are_refused() -> None:
    for given in (None, 3, b"a cat", {"text": "a cat"}):
        with pytest.raises(ArgumentTypeError, match="^pipeline: inputs: expected a string, got "):
            make()(given)


def test_a_seed_is_for_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches go on with its numbers: images of equal texts differ."""
    pipeline = make()
    monkeypatch.setattr(pipeline, "_sampler", lambda *_: SimpleNamespace(initial_scale=1))
    pipeline._prompts = SimpleNamespace(encode=lambda *_: {})
    monkeypatch.setattr(pipeline, "_denoise", lambda conditions, latents, *_: latents)
    monkeypatch.setattr(pipeline, "_decode", lambda latents, *_: latents)
    together = pipeline(["a", "a", "a"], seed=3)
    assert not np.array_equal(together[0], together[1]) and not np.array_equal(together[1], together[2])
    np.testing.assert_array_equal(pipeline(["a", "a", "a"], seed=3, batch_size=1), together)
    np.testing.assert_array_equal([*pipeline(iter(["a", "a", "a"]), seed=3, batch_size=2)], together)
    np.testing.assert_array_equal(pipeline("a", seed=3), together[0])
