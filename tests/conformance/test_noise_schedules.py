"""Samplers of diffusion models beside diffusers' schedulers, on the same outputs of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import diffusion_models

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 7
SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "v_prediction", "sample")
# As published: PixArt's, of DreamShaper XL and Playground 2.
DPM: list[dict[str, Any]] = [
    {}, {"solver_order": 1}, {"euler_at_final": True, "final_sigmas_type": "sigma_min"}, {"use_karras_sigmas": True},
    {"lower_order_final": False, "final_sigmas_type": "sigma_min"}, {"beta_schedule": "linear", "beta_start": 1e-4},
]  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("DDIMScheduler", {"timestep_spacing": spacing, "prediction_type": prediction, "clip_sample": clips})
      for spacing in SPACINGS for prediction in PREDICTIONS for clips in (spacing == "linspace",)),
    # diffusers' have no "sample".
    *(("PNDMScheduler", {"timestep_spacing": spacing, "prediction_type": prediction, "skip_prk_steps": skips, **fields})
      for spacing in SPACINGS for prediction in PREDICTIONS[:2] for skips in (True, False)
      for fields in ({}, {"set_alpha_to_one": True, "steps_offset": 0})),
    ("PNDMScheduler", {}),
    *(("EulerAncestralDiscreteScheduler", {"timestep_spacing": spacing, "prediction_type": prediction})
      for spacing in SPACINGS for prediction in PREDICTIONS[:2]),
    *(("LCMScheduler", {"prediction_type": prediction, "clip_sample": clips, "original_inference_steps": count})
      for prediction in PREDICTIONS for clips in (True, False) for count in (20, 50, 100)),
    ("LCMScheduler", {"timestep_scaling": 2.0, "beta_schedule": "linear"}),
    *(("EulerDiscreteScheduler", {"timestep_spacing": spacing, "prediction_type": prediction})
      for spacing in SPACINGS for prediction in PREDICTIONS[:2]),
    *(("EulerDiscreteScheduler", {"timestep_spacing": spacing, "use_karras_sigmas": True}) for spacing in SPACINGS),
    ("EulerDiscreteScheduler", {"final_sigmas_type": "sigma_min"}),
    *(("DPMSolverMultistepScheduler", {"timestep_spacing": spacing, "prediction_type": prediction, **fields})
      for spacing in SPACINGS for prediction in PREDICTIONS for fields in (DPM if prediction == "epsilon" else [{}])),
]  # fmt: skip
# As SD3's, FLUX.1-schnell's and FLUX.1-dev's.
FLOWS: list[tuple[dict[str, Any], bool]] = [
    ({"shift": 3.0}, False), ({"shift": 1.0}, True), ({"use_dynamic_shifting": True, "max_shift": 1.15}, True),
    ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, False),
]  # fmt: skip


def compare(theirs: Any, ours: Any, text: str) -> None:
    """The latents after the steps, and what the model reads in each."""
    import torch

    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((len(ours.timesteps), 1, 4, 2, 2), np.float32)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=1e-5, err_msg=text)
    noise = rng.standard_normal((1, 4, 2, 2), np.float32)
    mine, their = noise * np.float32(ours.initial_scale), torch.from_numpy(noise)
    their = their * getattr(theirs, "init_noise_sigma", 1.0)
    for index, time in enumerate(theirs.timesteps):
        read = theirs.scale_model_input(their, time) if hasattr(theirs, "scale_model_input") else their
        np.testing.assert_allclose(ours.scale(mine, index), read.numpy(), rtol=2e-4, atol=2e-4, err_msg=text)
        mine = ours.step(outputs[index], mine, index)
        their = theirs.step(torch.from_numpy(outputs[index]), time, their).prev_sample
    np.testing.assert_allclose(mine, their.numpy(), rtol=2e-3, atol=2e-3, err_msg=text)


@pytest.mark.parametrize("steps", [STEPS, 20])
def test_schedules_equal_those_of_diffusers(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every spacing and prediction; few steps, and so many that DPM-Solver++ ends otherwise. Noise between the steps is
    of numpy's generators of one seed.
    """
    from untorch.export.recipes.diffusion.schedules import read_schedule
    from untorch.pipeline.noise_schedules import make_sampler

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    for name, fields in CASES:
        diffusion_models.scheduler_config(tmp_path, name, **{"steps_offset": 1, **fields})
        theirs = getattr(diffusers, name).from_pretrained(tmp_path / "scheduler")
        theirs.set_timesteps(steps)
        diffusion_models.draw_by_numpy(monkeypatch, theirs, 1)
        compare(theirs, make_sampler(read_schedule(tmp_path), steps, np.random.default_rng(1)), f"{name} {fields}")


@pytest.mark.parametrize("name", ["DDIMScheduler", "PNDMScheduler", "EulerAncestralDiscreteScheduler", "LCMScheduler"])
def test_defaults_equal_those_of_diffusers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of a class's name alone."""
    from untorch.export.recipes.diffusion.schedules import read_schedule
    from untorch.pipeline.noise_schedules import make_sampler

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name}))
    theirs = getattr(diffusers, name)()
    theirs.set_timesteps(STEPS)
    diffusion_models.draw_by_numpy(monkeypatch, theirs, 1)
    compare(theirs, make_sampler(read_schedule(tmp_path), STEPS, np.random.default_rng(1)), name)


@pytest.mark.parametrize(("fields", "to_zero"), FLOWS)
def test_flow_schedules_equal_those_of_diffusers(fields: dict[str, Any], to_zero: bool, tmp_path: Path) -> None:
    from untorch.export.recipes.diffusion.schedules import read_flow_schedule
    from untorch.pipeline.noise_schedules import make_sampler

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    diffusion_models.scheduler_config(
        tmp_path, "FlowMatchEulerDiscreteScheduler", **{"num_train_timesteps": 1000, **fields}
    )
    theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "scheduler")
    tokens = 1024
    shift = calculate_shift(tokens, max_shift=1.15) if fields.get("use_dynamic_shifting") else None
    sigmas = np.linspace(1, 1 / STEPS, STEPS) if to_zero else None
    theirs.set_timesteps(STEPS, sigmas=sigmas, mu=shift)
    schedule = read_flow_schedule(tmp_path, lambda: tokens, to_zero=to_zero)
    compare(theirs, make_sampler(schedule, STEPS), str(fields))
