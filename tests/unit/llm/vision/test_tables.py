"""An encoder's tables: places, positions of a grid, windows."""

from __future__ import annotations

import numpy as np

from tests.unit.llm.vision.encoders import settings
from untorch.llm.vision.tables import encoder_tables


def test_places_of_patches() -> None:
    [axes] = encoder_tables(2, 3, settings())
    assert axes.shape == (6, 4, 2)
    assert axes[0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert axes[5].tolist() == [[2, 4], [2, 5], [3, 4], [3, 5]]


def test_positions_between_those_that_were_learned() -> None:
    """Weights add up to 1; a plane over the grid is found again."""
    axes, indices, weights = encoder_tables(2, 3, settings(tables=("axes", "position_grid"), grid_side=7))
    assert (indices.shape, weights.shape, weights.dtype) == ((6, 4, 4), (6, 4, 4), np.float32)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    row, column = indices // 7, indices % 7
    np.testing.assert_allclose((row * weights).sum(-1), axes[..., 0] * 6 / 3, rtol=1e-5)
    np.testing.assert_allclose((column * weights).sum(-1), axes[..., 1] * 6 / 5, rtol=1e-5)
    # One row of patches would be no distance apart.
    single = encoder_tables(1, 1, settings(tables=("position_grid",), grid_side=7, merge_size=1))
    assert single[0].min() >= 0
    assert np.isfinite(single[1]).all()


def test_windows() -> None:
    order, index, is_real, places = encoder_tables(3, 5, settings(tables=("windows",), window_side=2))
    # Windows of 2 × 2 units, 2 × 1 at the right, 1 × 2 and 1 × 1 at the bottom.
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert is_real.sum(1).tolist() == [16, 16, 8, 8, 8, 4]
    assert index.shape == is_real.shape == (6, 16)
    # Every patch is in one window, and is found there.
    assert index[is_real].tolist() == list(range(60))
    assert index.reshape(-1)[places.reshape(-1)].tolist() == list(range(60))
    assert is_real.reshape(-1)[places.reshape(-1)].all()
