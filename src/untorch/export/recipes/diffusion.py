"""Recipe for text to image: Stable Diffusion's text encoders, U-Net and decoder as methods, its schedule as numbers."""

from __future__ import annotations

import json
from functools import partial
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
from untorch.pipeline.settings import SECOND_TOKENIZER, TOKENIZER
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["DIFFUSION_PIPELINES", "TASK", "pipeline_of", "read_schedule", "write_diffusion"]

TASK = "text-to-image"
_XL = "StableDiffusionXLPipeline"
DIFFUSION_PIPELINES = ("StableDiffusionPipeline", _XL)
_XL_SCALE = 5.0  # of guidance, where a call names none: diffusers' default
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


class TextEncoderPair(nn.Module):
    """forward(input_ids, input_ids_2; each [batch, sequence] int64) → hidden [batch, sequence, width] of both encoders,
    side by side, and pooled [batch, projection] of the second one; float32.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.train(first.training)

    def forward(self, input_ids: torch.Tensor, input_ids_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the layers before the last ones, not normalised."""
        found = [
            self.first(input_ids=input_ids, output_hidden_states=True),
            self.second(input_ids=input_ids_2, output_hidden_states=True),
        ]
        hidden = torch.cat([one.hidden_states[-2] for one in found], -1)
        return hidden.float(), found[1].text_embeds.float()


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


class SizedPredictor(nn.Module):
    """forward(latents [batch, channels, height, width], timestep [1], hidden, pooled [batch, projection]) → as latents;
    float32.

    size: height and width in pixels, of the image and of those that it was trained with, without a crop.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.size = model, size
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.train(model.training)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor, pooled: torch.Tensor
    ) -> torch.Tensor:
        """Noise, or what the schedule's prediction says."""
        numbers = torch.tensor([[*self.size, 0, 0, *self.size]], dtype=self.dtype, device=latents.device)
        given = {"text_embeds": pooled.to(self.dtype), "time_ids": numbers.expand(latents.shape[0], -1)}
        found: torch.Tensor = self.model(
            latents.to(self.dtype), timestep, encoder_hidden_states=hidden.to(self.dtype), added_cond_kwargs=given
        ).sample
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

    kind: Any = torch.float32 if dtype is None else dtype
    given = {"torch_dtype": kind, "local_files_only": True}
    unet = load_weights(lambda: diffusers.UNet2DConditionModel.from_pretrained(folder / "unet", **given)).eval()
    vae = load_weights(lambda: diffusers.AutoencoderKL.from_pretrained(folder / "vae", **given)).eval()
    _check_parts(folder, name, unet.config, vae.config)
    if name == _XL and kind == torch.float16 and vae.config.force_upcast:  # its values exceed float16
        vae = vae.float()
    size, channels = unet.config.sample_size, int(unet.config.in_channels)
    height, width = (size, size) if isinstance(size, int) else (int(one) for one in size)
    encoder, section, files = (_xl_text_encoder if name == _XL else _text_encoder)(folder, dtype, kind)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, channels, height, width, generator=generator)
    conditions = [torch.randn(2, *shape, generator=generator) for shape in _condition_shapes(encoder, section)]
    batch = {0: Dim("batch", min=1, max=_MOST_IMAGES)}
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    predictor = SizedPredictor(unet, (height * scale, width * scale)) if name == _XL else Predictor(unet)
    methods = {
        "encode_text": encoder,
        "predict": {
            "model": predictor, "args": (latents, torch.tensor([1.0]), *conditions),
            "dynamic_shapes": (batch, None, *(batch for _ in conditions)),
        },
        "decode": {"model": Decoder(vae), "args": (latents[:1],)},
    }  # fmt: skip
    return Made(methods, {"latent_shape": [channels, height, width], "schedule": schedule, **section}, files)


def _check_parts(folder: Path, name: str, unet: Any, vae: Any) -> None:
    """Of configs. Raises CompileError for a U-Net or an autoencoder that reads what the pipeline does not give."""
    added = "text_time" if name == _XL else None
    if unet.addition_embed_type != added or unet.class_embed_type is not None:
        more = ", a pooled text and sizes" if name == _XL else ""
        problem = "reads more than" if name != _XL else "does not read, or reads more than,"
        raise CompileError(f"export_folder: {folder}: its U-Net {problem} latents, a time step and a text{more}")
    if name == _XL and (unet.time_cond_proj_dim is not None or getattr(vae, "latents_mean", None) is not None):
        raise CompileError(
            f"export_folder: {folder}: expected a U-Net without time_cond_proj_dim and an autoencoder without "
            "latents_mean: write a script for untorch export SCRIPT:FUNCTION"
        )


# The method encode_text, the section and the files of tokenizers.
_Encoder = tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]


def _text_encoder(folder: Path, dtype: torch.dtype | None, kind: Any) -> _Encoder:
    from transformers import CLIPTextModel

    kind_of_text: Any = CLIPTextModel
    text = load_weights(
        lambda: kind_of_text.from_pretrained(folder / "text_encoder", dtype=kind, local_files_only=True)
    ).eval()
    front, files = _front_end(folder / "tokenizer", text, dtype)
    return text_inputs(TextEncoder(text), front, front["max_length"]), front, files


def _xl_text_encoder(folder: Path, dtype: torch.dtype | None, kind: Any) -> _Encoder:
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    kinds: tuple[Any, Any] = (CLIPTextModel, CLIPTextModelWithProjection)
    given = {"dtype": kind, "local_files_only": True}
    first, second = (
        load_weights(partial(one.from_pretrained, folder / name, **given)).eval()
        for one, name in zip(kinds, ("text_encoder", "text_encoder_2"), strict=True)
    )
    front, files = _front_end(folder / "tokenizer", first, dtype)
    front_2, files_2 = _front_end(folder / "tokenizer_2", second, dtype)
    if front["max_length"] != front_2["max_length"]:
        raise CompileError(
            f"export_folder: {folder}: expected one length of both tokenizers, got {front['max_length']} and "
            f"{front_2['max_length']}"
        )
    method = text_inputs(TextEncoderPair(first, second), front, front["max_length"])
    method["args"], method["dynamic_shapes"] = method["args"] * 2, method["dynamic_shapes"] * 2
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    section = {
        **front, "second_text": front_2, "guidance_scale": _XL_SCALE,
        "zeros_without_negative_prompt": bool(index.get("force_zeros_for_empty_prompt", True)),
    }  # fmt: skip
    return method, section, {**files, SECOND_TOKENIZER: files_2[TOKENIZER]}


def _front_end(folder: Path, text: Any, dtype: torch.dtype | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    front, files = text_front_end(Source(folder, {}, type(text).__name__, dtype), text)
    return front | {"text_inputs": ["input_ids"], "fixed_length": front["max_length"], "padding_side": "right"}, files


def _condition_shapes(encoder: dict[str, Any], section: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of the text encoder's outputs, without the batch."""
    model: Any = encoder["model"]
    length: int = section["max_length"]
    if section.get("second_text") is None:
        return [(length, int(model.model.config.hidden_size))]
    widths = [int(part.config.hidden_size) for part in (model.first, model.second)]
    return [(length, sum(widths)), (int(model.second.config.projection_dim),)]


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
