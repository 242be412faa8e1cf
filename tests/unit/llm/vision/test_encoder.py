"""Prompts with images become prompts with embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.llm.vision.encoders import settings
from untorch.llm.vision import encoder as module
from untorch.llm.vision.encoder import ImageEncoder
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

SMALL, WIDE = np.zeros((16, 8, 3), np.uint8), np.full((8, 24, 3), 7, np.uint8)


def make(calls: list[Any] | None = None, **fields: Any) -> ImageEncoder:
    def method(patches: np.ndarray, *tables: np.ndarray) -> np.ndarray:
        if calls is not None:
            calls.append((patches, *tables))
        return patches.mean(axis=(1, 2), keepdims=True)[:, 0].repeat(4, axis=1)

    return ImageEncoder(settings(**fields), method, 3)


def test_placeholders_become_embeddings() -> None:
    calls: list[Any] = []
    found = make(calls).expand([1, 9, 2, 9], [SMALL, WIDE], 100)
    assert found.tokens == [1, 9, 9, 2, 9, 9, 9]
    assert {place: array.shape for place, array in found.embeddings.items()} == {1: (2, 4), 4: (3, 4)}
    assert found.positions.tolist() == [
        [0, 1, 1, 3, 4, 4, 4], [0, 1, 2, 3, 4, 4, 4], [0, 1, 1, 3, 4, 5, 6]
    ]  # fmt: skip
    assert [len(call[0]) for call in calls] == [2, 3]
    assert all(call[1].shape == (len(call[0]), 4, 2) for call in calls)


def test_an_image_is_encoded_once() -> None:
    calls: list[Any] = []
    made = make(calls)
    first = made.expand([9], [SMALL], 100).embeddings[0]
    assert made.expand([9, 9], [WIDE, SMALL], 100).embeddings[3] is first
    assert len(calls) == 2
    # The same pixels in another shape are another image.
    made.expand([9, 9], [np.zeros((8, 16, 3), np.uint8), SMALL], 100)
    assert len(calls) == 3


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 60)  # of 32 and 48
    calls: list[Any] = []
    made = make(calls)
    for image in (SMALL, WIDE, SMALL, SMALL):
        made.expand([9], [image], 100)
    assert len(calls) == 3


def test_wrong_images() -> None:
    made = make()
    for tokens, images, text in (
        ([1, 9], [], "prompt: images: expected 1, one for each token 9 of the prompt, got 0"),
        ([1, 2], [SMALL], "prompt: images: expected 0, one for each token 9 of the prompt, got 1"),
        ([1, 9], [SMALL[0]], "prompt: images: expected an array [height, width, 3] of uint8, got uint8 [8, 3]"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            made.expand(tokens, images, 100)
        assert str(caught.value) == text
    with pytest.raises(InvalidArgumentError) as caught:
        made.expand([9, 1], [WIDE], 3)
    assert str(caught.value) == (
        "prompt: expected at most 3 tokens, got 4, 3 of them of images: use fewer or smaller images"
    )
    with pytest.raises(ArgumentTypeError) as wrong:
        made.expand([9], "photo.jpg", 100)
    assert str(wrong.value) == "prompt: images: expected a list of images, got str"


def test_the_largest_image() -> None:
    calls: list[Any] = []
    make(calls).rehearse()
    assert calls[0][0].shape == (64, 4, 96)
