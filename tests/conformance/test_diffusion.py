"""Text to image, torch-free: the pixels are those of diffusers' pipeline, by DDIM and by Euler's method."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import diffusion_models

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = """
import sys
sys.modules["torch"] = None
import json, numpy, untorch
job = json.load(open(sys.argv[1]))
latents = numpy.load(job["latents"])
with untorch.pipeline(job["package"]) as pipeline:
    images = [pipeline(text, latents=latents, output_type="np", **options) for text, options in job["calls"]]
    again = [pipeline("a cat", seed=seed, num_inference_steps=1) for seed in (1, 1, 2)]
assert again[0].size == (16, 16) and again[0].tobytes() == again[1].tobytes() != again[2].tobytes()
numpy.save(job["images"], numpy.stack(images))
"""
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("a photo of a cat", {"num_inference_steps": 6, "guidance_scale": 4.0}),
    ("the red dog", {"num_inference_steps": 6, "guidance_scale": 4.0, "negative_prompt": "cat on a mat"}),
    ("the red dog", {"num_inference_steps": 3, "guidance_scale": 1.0}),
]


# An empty negative prompt is encoded, none at all is zeros.
XL_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("a photo of a cat", {"num_inference_steps": 4}),
    ("a photo of a cat", {"num_inference_steps": 4, "negative_prompt": ""}),
    ("the red dog", {"num_inference_steps": 2, "guidance_scale": 1.0}),
]


def run_calls(package: Path, latents: np.ndarray, calls: list[tuple[str, dict[str, Any]]], folder: Path) -> np.ndarray:
    """The images, in a process in which torch cannot be imported."""
    np.save(folder / "latents.npy", latents)
    job = {"package": str(package), "latents": str(folder / "latents.npy"), "images": str(folder / "images.npy")}
    (folder / "job.json").write_text(json.dumps({**job, "calls": calls}))
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    done = subprocess.run(
        [python, "-c", RUN, str(folder / "job.json")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(folder / "images.npy")


@pytest.mark.slow
def test_pixels_equal_those_of_diffusers(tmp_path: Path) -> None:
    import torch

    from untorch.export import export_folder

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    folder, package = tmp_path / "sd", tmp_path / "sd.pt2"
    folder.mkdir()
    diffusion_models.make_folder(diffusers, folder)
    export_folder(folder, package, progress=False)
    latents = np.random.default_rng(0).standard_normal((4, 8, 8), np.float32)
    found = run_calls(package, latents, CALLS, tmp_path)

    eager = diffusion_models.make_pipeline(diffusers, folder)
    for (text, options), image in zip(CALLS, found, strict=True):
        wanted = eager(text, latents=torch.from_numpy(latents)[None], output_type="np", **options).images[0]
        np.testing.assert_allclose(image, wanted, atol=2e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-3, "the text matters"


@pytest.mark.exhaustive
def test_pixels_of_xl_equal_those_of_diffusers(tmp_path: Path) -> None:
    import torch

    from untorch.export import export_folder

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    folder, package = tmp_path / "xl", tmp_path / "xl.pt2"
    folder.mkdir()
    diffusion_models.make_xl_folder(diffusers, folder)
    export_folder(folder, package, progress=False)
    latents = np.random.default_rng(0).standard_normal((4, 8, 8), np.float32)
    found = run_calls(package, latents, XL_CALLS, tmp_path)

    eager = diffusion_models.make_pipeline(diffusers, folder)
    for (text, options), image in zip(XL_CALLS, found, strict=True):
        wanted = eager(text, latents=torch.from_numpy(latents)[None], output_type="np", **options).images[0]
        np.testing.assert_allclose(image, wanted, atol=2e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-3, "no negative prompt is not an empty one"


def test_schedules_equal_those_of_diffusers(tmp_path: Path) -> None:
    """Every spacing and prediction, on the same outputs of a model."""
    import torch

    from untorch.export.recipes.diffusion import read_schedule
    from untorch.pipeline.noise_schedules import make_sampler

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((8, 1, 4, 2, 2), np.float32)
    for name in ("DDIMScheduler", "EulerDiscreteScheduler"):
        for spacing in ("leading", "trailing", "linspace"):
            for prediction in ("epsilon", "v_prediction", "sample"):
                if (name, prediction) == ("EulerDiscreteScheduler", "sample"):
                    continue  # diffusers has it not
                fields = {"timestep_spacing": spacing, "prediction_type": prediction, "steps_offset": 1}
                fields |= {"clip_sample": spacing == "linspace"} if name.startswith("DDIM") else {}
                diffusion_models.scheduler_config(tmp_path, name, **fields)
                theirs = getattr(diffusers, name).from_pretrained(tmp_path / "scheduler")
                theirs.set_timesteps(7)
                ours = make_sampler(read_schedule(tmp_path), 7)
                np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=1e-6)
                noise = rng.standard_normal((1, 4, 2, 2), np.float32)
                mine, their = noise * np.float32(ours.initial_scale), torch.from_numpy(noise) * theirs.init_noise_sigma
                for index, time in enumerate(theirs.timesteps):
                    read = theirs.scale_model_input(their, time)
                    np.testing.assert_allclose(ours.scale(mine, index), read.numpy(), rtol=2e-4, atol=2e-4)
                    mine = ours.step(outputs[index], mine, index)
                    their = theirs.step(torch.from_numpy(outputs[index]), time, their).prev_sample
                np.testing.assert_allclose(mine, their.numpy(), rtol=2e-3, atol=2e-3, err_msg=f"{name} {fields}")
