"""Recipe for text to image: Stable Diffusion's text encoder, U-Net and decoder as methods, its schedule as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.hub import import_library
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import text_front_end, text_inputs
from untorch.export.streaming import load_weights
from untorch.pipeline.noise_schedules import PREDICTIONS, SPACINGS
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["DIFFUSION_PIPELINES", "TASK", "pipeline_of", "read_schedule", "write_diffusion"]

TASK = "text-to-image"
DIFFUSION_PIPELINES = ("StableDiffusionPipeline",)
_KINDS = {"DDIMScheduler": "ddim", "EulerDiscreteScheduler": "euler"}
_MOST_IMAGES = 16
# Of a scheduler's config: what is not served, and the value that it must have.
_NEUTRAL = {
    "thresholding": False, "rescale_betas_zero_snr": False, "use_karras_sigmas": False, "use_exponential_sigmas": False,
    "use_beta_sigmas": False, "interpolation_type": "linear", "timestep_type": "discrete", "final_sigmas_type": "zero",
}  # fmt: skip


class TextEncoder(nn.Module):
    """forward(input_ids [batch, sequence] int64) → hidden [batch, sequence, width] float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Of the last layer, normalised."""
        hidden: torch.Tensor = self.model(input_ids=input_ids)[0]
        return hidden.float()


class Predictor(nn.Module):
    """forward(latents [batch, channels, height, width], timestep [1], hidden) → as latents; float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.train(model.training)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Noise, or what the schedule's prediction says."""
        text = hidden.to(self.dtype)
        found: torch.Tensor = self.model(latents.to(self.dtype), timestep, encoder_hidden_states=text).sample
        return found.float()


class Decoder(nn.Module):
    """forward(latents [1, channels, height, width]) → pixels [1, 3, height, width] from -1 to 1; float32."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.factor = float(model.config.scaling_factor)
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.post, self.decoder = model.post_quant_conv, model.decoder
        self.train(model.training)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """The autoencoder's decoder, in one piece."""
        given = (latents / self.factor).to(self.dtype)
        found: torch.Tensor = self.decoder(given if self.post is None else self.post(given))
        return found.float()


def pipeline_of(folder: Path) -> str | None:
    """The class that a folder's model_index.json names; None: it has none. Raises InvalidArgumentError."""
    file = folder / "model_index.json"
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["_class_name"])
    except (ValueError, LookupError, TypeError):
        raise InvalidArgumentError(
            f'export_folder: {file}: expected "_class_name" with the name of a pipeline'
        ) from None


def write_diffusion(folder: Path, name: str, dtype: torch.dtype | None) -> Made:
    """Height and width are those of the U-Net's config.

    Raises CompileError if the pipeline or its scheduler is not served, UnsupportedError without diffusers.
    """
    from torch.export import Dim

    if name not in DIFFUSION_PIPELINES:
        raise CompileError(
            f"export_folder: {folder}: expected {', '.join(DIFFUSION_PIPELINES)}, got {name}: write a script for "
            "untorch export SCRIPT:FUNCTION"
        )
    schedule = read_schedule(folder)
    diffusers = import_library("diffusers")
    from transformers import CLIPTextModel

    kind: Any = torch.float32 if dtype is None else dtype
    given = {"torch_dtype": kind, "local_files_only": True}
    unet = load_weights(lambda: diffusers.UNet2DConditionModel.from_pretrained(folder / "unet", **given)).eval()
    vae = load_weights(lambda: diffusers.AutoencoderKL.from_pretrained(folder / "vae", **given)).eval()
    kind_of_text: Any = CLIPTextModel
    text = load_weights(
        lambda: kind_of_text.from_pretrained(folder / "text_encoder", dtype=kind, local_files_only=True)
    ).eval()
    if unet.config.addition_embed_type is not None or unet.config.class_embed_type is not None:
        raise CompileError(f"export_folder: {folder}: its U-Net reads more than latents, a time step and a text")
    source = Source(folder / "tokenizer", {}, type(text).__name__, dtype)
    front, files = text_front_end(source, text)
    front |= {"text_inputs": ["input_ids"], "fixed_length": front["max_length"], "padding_side": "right"}
    size, channels = unet.config.sample_size, int(unet.config.in_channels)
    shape = [channels, *([size, size] if isinstance(size, int) else [int(one) for one in size])]
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *shape, generator=generator)
    hidden = torch.randn(2, front["max_length"], int(text.config.hidden_size), generator=generator)
    batch = {0: Dim("batch", min=1, max=_MOST_IMAGES)}
    methods = {
        "encode_text": text_inputs(TextEncoder(text), front, front["max_length"]),
        "predict": {
            "model": Predictor(unet), "args": (latents, torch.tensor([1.0]), hidden),
            "dynamic_shapes": (batch, None, batch),
        },
        "decode": {"model": Decoder(vae), "args": (latents[:1],)},
    }  # fmt: skip
    return Made(methods, {"latent_shape": shape, "schedule": schedule, **front}, files)


def read_schedule(folder: Path) -> dict[str, Any]:
    """As ``untorch.pipeline.noise_schedules`` has it, of scheduler/scheduler_config.json. Raises CompileError."""
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        raise InvalidArgumentError(f"export_folder: {folder}: expected scheduler/scheduler_config.json, got none")
    config = json.loads(file.read_text(encoding="utf-8"))
    name = config.get("_class_name")

    def need(key: str, known: Any, value: Any) -> Any:
        if value not in known:
            raise CompileError(f"export_folder: {file}: {key}: expected {' or '.join(map(str, known))}, got {value!r}")
        return value

    if name not in _KINDS:
        raise CompileError(
            f"export_folder: {file}: _class_name: expected {' or '.join(_KINDS)}, got {name}: name one of "
            "them there, as they run models of the same training"
        )
    for key, neutral in _NEUTRAL.items():
        need(key, (neutral,), config.get(key, neutral))
    if config.get("trained_betas") is not None:
        raise CompileError(f"export_folder: {file}: trained_betas: expected none, got some")
    count = int(config.get("num_train_timesteps", 1000))
    start, end = float(config.get("beta_start", 1e-4)), float(config.get("beta_end", 0.02))
    shape = need("beta_schedule", ("linear", "scaled_linear"), config.get("beta_schedule", "linear"))
    if shape == "linear":
        betas = torch.linspace(start, end, count, dtype=torch.float32)
    else:
        betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float32) ** 2
    alphas = torch.cumprod(1 - betas, 0)
    kind = _KINDS[str(name)]
    spacing = config.get("timestep_spacing", "linspace" if kind == "euler" else "leading")
    clips = config.get("clip_sample", name == "DDIMScheduler") and kind == "ddim"
    return {
        "kind": kind,
        "alphas": alphas.tolist(),
        "prediction": need("prediction_type", PREDICTIONS, config.get("prediction_type", "epsilon")),
        "spacing": need("timestep_spacing", SPACINGS, spacing),
        "offset": int(config.get("steps_offset", 0)),
        "final_alpha": 1.0 if config.get("set_alpha_to_one", name == "DDIMScheduler") else float(alphas[0]),
        "clip": float(config.get("clip_sample_range", 1.0)) if clips else None,
    }
