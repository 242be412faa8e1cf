"""Text to image by U-Nets: the pixels are those of diffusers' pipeline, torch-free and of other schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import diffusion_models

pytestmark = pytest.mark.filterwarnings("ignore")

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


@pytest.mark.parametrize(
    ("kind", "scheduler", "fields"),
    [
        ("StableDiffusionPipeline", None, {}),
        ("StableDiffusionPipeline", "DDIMScheduler", {}),  # whose steps_offset and clip_sample the pipeline sets
        ("StableDiffusionPipeline", "PNDMScheduler", {"skip_prk_steps": False}),
        ("StableDiffusionPipeline", "DPMSolverMultistepScheduler", {"prediction_type": "v_prediction"}),
        ("StableDiffusionPipeline", "LCMScheduler", {"original_inference_steps": 20}),
        ("StableDiffusionXLPipeline", "EulerAncestralDiscreteScheduler", {"timestep_spacing": "trailing"}),
        ("StableDiffusionXLPipeline", None, {}),
        ("StableDiffusionXLPipeline", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    ],
)
def test_schedulers_within_pipelines(
    kind: str, scheduler: str | None, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's modules, without a compile. No scheduler: the one that the model is published with."""
    import torch

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    is_xl = kind == "StableDiffusionXLPipeline"
    (diffusion_models.make_xl_folder if is_xl else diffusion_models.make_folder)(diffusers, tmp_path)
    if scheduler is not None:
        diffusion_models.scheduler_config(tmp_path, scheduler, **fields)
    latents = np.random.default_rng(0).standard_normal((4, 8, 8), np.float32)
    ours, eager = diffusion_models.run_eagerly(kind, tmp_path), diffusion_models.make_pipeline(diffusers, tmp_path)
    fewest = 1 if fields.get("skip_prk_steps", True) else 4  # of PNDM's Runge-Kutta steps
    calls = [call for call in (XL_CALLS if is_xl else CALLS) if call[1]["num_inference_steps"] >= fewest]
    for text, options in calls:
        image = ours(text, latents=latents, output_type="np", seed=1, **options)
        diffusion_models.draw_by_numpy(monkeypatch, eager.scheduler, 1)
        wanted = eager(text, latents=torch.from_numpy(latents)[None], output_type="np", **options).images[0]
        np.testing.assert_allclose(image, wanted, atol=2e-4)


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
    found = diffusion_models.run_calls(package, latents, CALLS, tmp_path)

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
    found = diffusion_models.run_calls(package, latents, XL_CALLS, tmp_path)

    eager = diffusion_models.make_pipeline(diffusers, folder)
    for (text, options), image in zip(XL_CALLS, found, strict=True):
        wanted = eager(text, latents=torch.from_numpy(latents)[None], output_type="np", **options).images[0]
        np.testing.assert_allclose(image, wanted, atol=2e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-3, "no negative prompt is not an empty one"
