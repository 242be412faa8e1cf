"""The build's own check of images: another encoder, other positions or features are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.vision_models import VOCABULARY, image_processor, make_model
from untorch.export import CompileError
from untorch.export.lm import vision, vision_check
from untorch.export.lm.embeddings import EmbeddingStep
from untorch.export.lm.images import read_images
from untorch.export.lm.step import Step
from untorch.export.lm.text import take_text_model

pytestmark = pytest.mark.filterwarnings("ignore")


def check(name: str, change: Callable[[], None] = lambda: None, levels: int | None = None) -> None:
    model: Any = make_model(name)
    text = take_text_model(model, "generate", None, True)
    part = read_images(model, image_processor(), None, 32, VOCABULARY)
    change()
    with part.attention():
        twin = EmbeddingStep(Step(text, position_rows=3), part.levels)
        if levels is not None:
            part.encoder.forward = lambda *given: part.encoder.__class__.forward(part.encoder, *given)[:, :32]
            twin.levels = levels
        part.check(twin)
    assert model.base_model.rope_deltas is None


def test_a_model_that_is_right() -> None:
    check("Qwen3VL")


def test_other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def change() -> None:
        monkeypatch.setattr(
            vision_check, "image_positions", lambda length, images: np.repeat(np.arange(length)[None], 3, axis=0)
        )

    with pytest.raises(CompileError) as caught:
        check("Qwen2_5_VL", change)
    text = str(caught.value)
    assert text.startswith(
        "causal_lm: images: Qwen2_5_VLForConditionalGeneration: the logits behind two images differ by "
    )
    assert text.endswith(
        ": its images are encoded or placed in another way than is known; use inputs_embeds=True with an encoder and "
        "positions of your own"
    )


def test_windows_that_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = vision._attention

    def whole(module: Any, *given: torch.Tensor, cu_seq_lens_q: Any = None, **named: Any) -> Any:
        return own(module, *given, cu_seq_lens_q=vision._Whole(), **named)

    def change() -> None:
        monkeypatch.setattr(vision, "_attention", whole)

    with pytest.raises(CompileError, match="the logits behind two images differ by "):
        check("Qwen2_5_VL", change)


def test_features_of_the_first_layers_that_are_left_out() -> None:
    with pytest.raises(CompileError, match="the logits behind two images differ by "):
        check("Qwen3VL", levels=0)
