"""Samplers of diffusion models: what holds for any model, and schedules that are damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.pipeline.noise_schedules import fewest_steps, make_sampler, most_steps

ALPHAS = np.cumprod(1 - np.linspace(1e-3, 0.05, 100)).tolist()
# Of all kinds but "flow": each reads its own members.
SCHEDULE: dict[str, Any] = {
    "kind": "ddim", "alphas": ALPHAS, "prediction": "epsilon", "spacing": "leading", "offset": 0, "final_alpha": 1.0,
    "clip": None, "original_steps": 50, "time_scale": 1e3, "karras": False, "final_sigma": 0.0, "order": 2, "lower_order_final": True, "euler_at_final": False,
}  # fmt: skip
FLOW: dict[str, Any] = {"kind": "flow", "count": 1000, "shift": 3.0, "smallest": 0.003}


@pytest.mark.parametrize("karras", [False, True])
@pytest.mark.parametrize("kind", ["ddim", "euler", "euler-ancestral", "dpm", "lcm"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_a_model_that_knows_the_image_finds_it(kind: str, spacing: str, karras: bool) -> None:
    schedule = {**SCHEDULE, "kind": kind, "spacing": spacing, "prediction": "sample", "karras": karras}
    sampler = make_sampler(schedule, 10)
    assert len(sampler.timesteps) == 10 and (np.diff(sampler.timesteps) <= 0).all()
    image = np.random.default_rng(0).standard_normal((1, 2, 3, 3), np.float32)
    latents = np.ones_like(image) * np.float32(sampler.initial_scale)
    for index in range(10):
        latents = sampler.step(image, latents, index)
    np.testing.assert_allclose(latents, image, atol=1e-5)


@pytest.mark.parametrize("kind", ["plms", "pndm"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_a_model_that_knows_the_noise_finds_the_image(kind: str, spacing: str) -> None:
    """Which is the same in all calls, one more than steps for PLMS, nine more for PNDM."""
    sampler = make_sampler({**SCHEDULE, "kind": kind, "spacing": spacing}, 10)
    assert len(sampler.timesteps) == {"plms": 11, "pndm": 19}[kind] and (np.diff(sampler.timesteps) <= 0).all()
    noise, image = np.random.default_rng(0).standard_normal((2, 1, 2, 3, 3), np.float32)
    first = ALPHAS[int(sampler.timesteps[0])]
    latents = np.float32(first**0.5) * image + np.float32((1 - first) ** 0.5) * noise
    for index in range(len(sampler.timesteps)):
        latents = sampler.step(noise, latents, index)
    np.testing.assert_allclose(latents, image, atol=1e-5)


def test_a_single_step_of_plms_is_ddims() -> None:
    output, latents = np.random.default_rng(0).standard_normal((2, 1, 4), np.float32)
    ddim, plms = (make_sampler({**SCHEDULE, "kind": kind}, 1) for kind in ("ddim", "plms"))
    assert plms.timesteps.tolist() == ddim.timesteps.tolist()
    np.testing.assert_allclose(plms.step(output, latents, 0), ddim.step(output, latents, 0), rtol=1e-6)


@pytest.mark.parametrize("smallest", [0.003, None])
def test_a_model_that_knows_the_velocity_finds_the_image(smallest: float | None) -> None:
    sampler = make_sampler({**FLOW, "smallest": smallest}, 10)
    noise, image = np.random.default_rng(0).standard_normal((2, 1, 2, 3, 3), np.float32)
    latents = noise
    for index in range(10):
        assert sampler.scale(latents, index) is latents
        latents = sampler.step(noise - image, latents, index)
    np.testing.assert_allclose(latents, image, atol=1e-5)
    assert sampler.timesteps[0] == 1000


def test_images_are_clipped() -> None:
    sampler = make_sampler({**SCHEDULE, "prediction": "sample", "clip": 1.0}, 1)
    found = sampler.step(np.full((1, 1), 5.0, np.float32), np.zeros((1, 1), np.float32), 0)
    assert found.max() <= 1.0 + 1e-6


@pytest.mark.parametrize("kind", ["euler-ancestral", "lcm"])
def test_noise_between_steps_is_of_the_generator(kind: str) -> None:
    output, latents = np.random.default_rng(0).standard_normal((2, 1, 4), np.float32)
    schedule = {**SCHEDULE, "kind": kind, "spacing": "trailing"}
    found = [make_sampler(schedule, 4, np.random.default_rng(seed)).step(output, latents, 1) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).min() > 0.01
    assert not np.array_equal(*(make_sampler(schedule, 4).step(output, latents, 1) for _ in range(2)))
    last = [make_sampler(schedule, 4, np.random.default_rng(seed)).step(output, latents, 3) for seed in (1, 2)]
    np.testing.assert_array_equal(*last)


def test_most_steps() -> None:
    found = [most_steps({**SCHEDULE, "kind": kind}) for kind in ("ddim", "euler", "dpm", "lcm")]
    assert found == [100, 100, 99, 50]
    found = [most_steps({**SCHEDULE, "kind": kind, "offset": 1}) for kind in ("ddim", "plms", "euler")]
    assert found == [99, 99, 100]
    assert most_steps({**SCHEDULE, "spacing": "trailing", "offset": 1}) == 100
    for steps in range(1, 100):
        assert make_sampler({**SCHEDULE, "offset": 1}, steps).timesteps[0] < 100
    assert most_steps(FLOW) == 1000
    assert [fewest_steps({**SCHEDULE, "kind": kind}) for kind in ("ddim", "plms", "pndm")] == [1, 1, 4]
    for spacing in ("leading", "trailing", "linspace"):
        sampler = make_sampler({**SCHEDULE, "kind": "dpm", "spacing": spacing}, 99)
        latents = np.ones((1, 1), np.float32)
        for index in range(99):
            latents = sampler.step(latents, latents, index)
        assert np.isfinite(latents).all()


@pytest.mark.parametrize(
    ("change", "steps", "error"),
    [
        ({"kind": "heun"}, 5, ValueError),
        ({"prediction": "flow"}, 5, ValueError),
        ({"spacing": None}, 5, ValueError),
        ({"alphas": []}, 5, ValueError),
        ({"alphas": [0.5, -1.0]}, 1, ValueError),
        ({}, 101, ValueError),
        ({"kind": "dpm"}, 100, ValueError),
        ({"kind": "plms"}, 101, ValueError),
        ({"offset": 1}, 100, ValueError),
        ({"offset": 2}, 50, ValueError),
        ({"kind": "pndm"}, 3, ValueError),
        ({"kind": "lcm"}, 51, ValueError),
        ({"kind": "lcm", "original_steps": 101}, 5, ValueError),
        ({"kind": "lcm", "time_scale": None}, 5, TypeError),
        ({"kind": "plms", "final_alpha": None}, 5, TypeError),
        ({"kind": "dpm", "order": "x"}, 5, ValueError),
        ({"kind": "dpm", "final_sigma": None}, 5, TypeError),
        ({"alphas": "many"}, 5, ValueError),
        ({"offset": "x"}, 5, ValueError),
        ({**FLOW, "count": 4}, 5, ValueError),
        ({**FLOW, "shift": 0.0}, 5, ValueError),
        ({**FLOW, "smallest": "x"}, 5, ValueError),
    ],
)
def test_schedules_that_are_damaged(change: dict[str, Any], steps: int, error: type) -> None:
    with pytest.raises(error):
        make_sampler({**SCHEDULE, **change}, steps)
    with pytest.raises(KeyError):
        make_sampler({}, 5)
