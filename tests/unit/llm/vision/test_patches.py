"""Images as patches."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.unit.llm.vision.encoders import settings
from untorch.llm.vision.patches import cut_patches, fit_size
from untorch.runtime.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((24, 40), (24, 40)),
        ((25, 37), (24, 40)),  # to the nearest unit of 8
        ((3, 5), (8, 16)),  # at least 64 pixels
        ((1000, 500), (88, 40)),  # at most 4096
        ((8, 1600), (8, 904)),  # a unit at least: more than 4096
    ],
)
def test_size_in_whole_units(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert fit_size(*size, settings()) == fitted


def test_an_image_that_is_too_long() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        fit_size(4, 1000, settings())
    assert str(caught.value) == (
        "prompt: images: expected sides of a ratio up to 200, got an image of 4 × 1000 pixels"
    )  # fmt: skip


def test_order_of_pixels() -> None:
    pixels = np.arange(16 * 24 * 3, dtype=np.uint32).reshape(16, 24, 3).astype(np.uint8)
    found = cut_patches(Image.fromarray(pixels), settings())
    assert (found.rows, found.columns, found.pixels.shape, found.pixels.dtype) == (2, 3, (6, 4, 96), np.float32)
    # The last patch of the unit in row 1 and column 2, its second frame, its last channel.
    patch = found.pixels[5, 3].reshape(3, 2, 4, 4)[2, 1]
    np.testing.assert_allclose(patch, (pixels[12:, 20:, 2] / 255 - 0.5) / 0.25, atol=1e-6)
