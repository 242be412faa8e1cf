"""Text to image by diffusion transformers: the pixels are those of diffusers' pipeline, torch-free and of every recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import diffusion_models, diffusion_transformers

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("a photo of a Cat", {"num_inference_steps": 4}),
    ("the red dog", {"num_inference_steps": 3, "negative_prompt": "cat on a mat"}),
    ("the red dog", {"num_inference_steps": 2, "guidance_scale": 1.0}),
]
DIT_CALLS: list[tuple[Any, dict[str, Any]]] = [
    ("white shark", {"num_inference_steps": 4}), (1, {"num_inference_steps": 3, "guidance_scale": 2.0}),
    ("Tinca tinca", {"num_inference_steps": 2, "guidance_scale": 1.0}),
]  # fmt: skip
# Flux takes no negative prompt.
FLUX_CALLS = [(text, {name: value for name, value in options.items() if "neg" not in name}) for text, options in CALLS]
BY_NAME = {"FluxPipeline": FLUX_CALLS, "DiTPipeline": DIT_CALLS}


def make_folder(name: str, folder: Path) -> Any:
    """diffusers."""
    import torch

    diffusers = diffusion_models.import_diffusers()
    if diffusers is None:
        pytest.skip("make puts diffusers into build/")
    torch.manual_seed(0)
    diffusion_transformers.MAKERS[name](diffusers, folder)
    return diffusers


def compare(eager: Callable[..., Any], found: np.ndarray, latents: np.ndarray, calls: list[Any]) -> None:
    """found: an image a call."""
    for (text, options), image in zip(calls, found, strict=True):
        np.testing.assert_allclose(image, eager(text, latents, **options), atol=5e-4, err_msg=f"{text} {options}")
    assert np.abs(found[0] - found[1]).max() > 1e-2, "the text matters"


def without_guidance(folder: Path) -> None:
    """As FLUX.1-schnell."""
    import torch
    from safetensors.torch import load_file, save_file

    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "guidance_embeds": False}))
    weights = next((folder / "transformer").glob("*.safetensors"))
    kept: dict[str, torch.Tensor] = {key: one for key, one in load_file(weights).items() if "guidance" not in key}
    save_file(kept, weights, {"format": "pt"})


def dynamic_shift(folder: Path) -> None:
    """As some of Stable Diffusion 3's schedules."""
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dynamic_shifting": True}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("StableDiffusion3Pipeline", None),
        ("StableDiffusion3Pipeline", diffusion_transformers.drop_t5),
        ("StableDiffusion3Pipeline", dynamic_shift),
        ("PixArtAlphaPipeline", None),
        ("PixArtSigmaPipeline", None),
        ("FluxPipeline", None),
        ("FluxPipeline", without_guidance),
        ("DiTPipeline", None),
    ],
)
def test_modules_and_front_end_equal_diffusers(
    name: str, change: Callable[[Path], None] | None, tmp_path: Path
) -> None:
    diffusers = make_folder(name, tmp_path)
    if change is not None:
        change(tmp_path)
    pipeline = diffusion_models.run_eagerly(name, tmp_path)
    calls = BY_NAME.get(name, CALLS)
    if change is without_guidance:
        calls = [(text, {"num_inference_steps": options["num_inference_steps"]}) for text, options in calls]
    latents = np.random.default_rng(0).standard_normal(pipeline.settings.get("latent_shape", list), np.float32)
    found = [pipeline(text, latents=latents, output_type="np", **options) for text, options in calls]
    compare(diffusion_transformers.load_pipeline(diffusers, tmp_path), found, latents, calls)


@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "PixArtSigmaPipeline", "FluxPipeline"])
def test_half_precision(name: str, tmp_path: Path) -> None:
    import torch

    make_folder(name, tmp_path)
    images = []
    for dtype in (None, torch.bfloat16):
        pipeline = diffusion_models.run_eagerly(name, tmp_path, dtype)
        images.append(pipeline("a cat", seed=0, output_type="np", num_inference_steps=2))
    assert 0 < np.abs(images[1] - images[0]).mean() < 0.05


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("StableDiffusion3Pipeline", marks=pytest.mark.slow),
        pytest.param("PixArtAlphaPipeline", marks=pytest.mark.slow),
        pytest.param("PixArtSigmaPipeline", marks=pytest.mark.exhaustive),
        pytest.param("FluxPipeline", marks=pytest.mark.exhaustive),
        pytest.param("DiTPipeline", marks=pytest.mark.exhaustive),
    ],
)
def test_pixels_equal_those_of_diffusers(name: str, tmp_path: Path) -> None:
    from untorch.export import export_folder

    folder, package = tmp_path / "folder", tmp_path / "model.pt2"
    diffusers = make_folder(name, folder)
    export_folder(folder, package, progress=False)
    latents = np.random.default_rng(0).standard_normal(diffusion_transformers.latent_shape(folder), np.float32)
    calls = BY_NAME.get(name, CALLS)
    found = diffusion_models.run_calls(package, latents, calls, tmp_path)
    compare(diffusion_transformers.load_pipeline(diffusers, folder), found, latents, calls)
