"""Semantic segmentation: logits to masks of the image's size."""

from __future__ import annotations

import numpy as np
import pytest

from untorch.pipeline.segmentation import _masks, segment


@pytest.mark.parametrize(("height", "width"), [(130, 90), (7, 5), (16, 12), (1, 300)])
def test_logits_are_resized_as_torch_does(height: int, width: int) -> None:
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).normal(size=(5, 16, 12)).astype(np.float32)
    resized = torch.nn.functional.interpolate(torch.from_numpy(logits)[None], (height, width), mode="bilinear")[0]
    found = segment(logits, (width, height))
    assert found.shape == (height, width)
    # Where two labels are as likely, rounding decides.
    first, second = resized.topk(2, 0).values
    clear = (first - second > 1e-5).numpy()
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found[clear], resized.argmax(0).numpy()[clear])


def test_a_mask_for_each_label_that_is_there() -> None:
    pytest.importorskip("PIL")
    found = _masks(np.array([[0, 2, 2], [0, 0, 2]]), ["sky", "sea", "sand"])
    assert [(one["label"], one["score"], one["mask"].mode) for one in found] == [
        ("sky", None, "L"),
        ("sand", None, "L"),
    ]
    np.testing.assert_array_equal(np.asarray(found[1]["mask"]), [[0, 255, 255], [0, 0, 255]])
