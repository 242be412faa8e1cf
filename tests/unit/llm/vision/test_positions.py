"""Rotary positions of prompts with images."""

from __future__ import annotations

from untorch.llm.vision.positions import image_positions


def test_text() -> None:
    assert image_positions(3, []).tolist() == [[0, 1, 2]] * 3


def test_text_goes_on_behind_the_longer_side() -> None:
    assert image_positions(10, [(1, 2, 3)]).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]


def test_images_behind_each_other() -> None:
    assert image_positions(4, [(0, 1, 2), (2, 2, 1)]).tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]
