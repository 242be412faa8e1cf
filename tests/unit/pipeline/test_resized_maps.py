"""Maps in an image's size: values and places are those of torch."""

from __future__ import annotations

import numpy as np
import pytest

from untorch.pipeline.resized_maps import nearest_indices, resize_bilinear


@pytest.mark.parametrize(("height", "width"), [(130, 90), (7, 5), (16, 12), (32, 24), (1, 300)])
def test_maps_are_resized_as_torch_does(height: int, width: int) -> None:
    torch = pytest.importorskip("torch")
    maps = np.random.default_rng(0).normal(size=(3, 16, 12)).astype(np.float32)
    resize = torch.nn.functional.interpolate
    smooth = resize(torch.from_numpy(maps)[None], (height, width), mode="bilinear")[0].numpy()
    np.testing.assert_allclose(resize_bilinear(maps, (width, height)), smooth, atol=1e-5)
    near = resize(torch.from_numpy(maps)[None], (height, width), mode="nearest")[0].numpy()
    rows, columns = nearest_indices(16, height), nearest_indices(12, width)
    np.testing.assert_array_equal(maps[:, rows][:, :, columns], near)
