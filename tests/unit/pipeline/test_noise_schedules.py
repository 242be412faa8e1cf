"""Samplers of diffusion models: what holds for any model, and schedules that are damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.pipeline.noise_schedules import make_sampler

ALPHAS = np.cumprod(1 - np.linspace(1e-3, 0.05, 100)).tolist()
SCHEDULE: dict[str, Any] = {
    "kind": "ddim", "alphas": ALPHAS, "prediction": "epsilon", "spacing": "leading", "offset": 0, "final_alpha": 1.0,
    "clip": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["ddim", "euler"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_a_model_that_knows_the_image_finds_it(kind: str, spacing: str) -> None:
    sampler = make_sampler({**SCHEDULE, "kind": kind, "spacing": spacing, "prediction": "sample"}, 10)
    image = np.random.default_rng(0).standard_normal((1, 2, 3, 3), np.float32)
    latents = np.ones_like(image) * np.float32(sampler.initial_scale)
    for index in range(10):
        latents = sampler.step(image, latents, index)
    np.testing.assert_allclose(latents, image, atol=1e-5)


def test_images_are_clipped() -> None:
    sampler = make_sampler({**SCHEDULE, "prediction": "sample", "clip": 1.0}, 1)
    found = sampler.step(np.full((1, 1), 5.0, np.float32), np.zeros((1, 1), np.float32), 0)
    assert found.max() <= 1.0 + 1e-6


@pytest.mark.parametrize(
    ("change", "steps", "error"),
    [
        ({"kind": "heun"}, 5, ValueError),
        ({"prediction": "flow"}, 5, ValueError),
        ({"spacing": None}, 5, ValueError),
        ({"alphas": []}, 5, ValueError),
        ({"alphas": [0.5, -1.0]}, 1, ValueError),
        ({}, 101, ValueError),
        ({"alphas": "many"}, 5, ValueError),
        ({"offset": "x"}, 5, ValueError),
    ],
)
def test_schedules_that_are_damaged(change: dict[str, Any], steps: int, error: type) -> None:
    with pytest.raises(error):
        make_sampler({**SCHEDULE, **change}, steps)
    with pytest.raises(KeyError):
        make_sampler({}, 5)
