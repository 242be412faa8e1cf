"""Pipelines of diffusers that the recipe serves, and their packages: encode_text (of texts), predict and decode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.recipes.diffusion.predictors import (
    ClassPredictor,
    Decoder,
    FluxPredictor,
    JointPredictor,
    MaskedPredictor,
    PooledPredictor,
    Predictor,
    UNetPredictor,
)
from untorch.export.recipes.diffusion.schedules import read_flow_schedule, read_schedule
from untorch.export.recipes.diffusion.text_encoders import (
    PipelineFolder,
    TextPart,
    clip,
    clip_pair,
    clip_t5,
    clips_t5,
    t5,
)
from untorch.export.recipes.hub import import_library
from untorch.export.recipes.source import Made
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["CLASS_TO_IMAGE", "DIFFUSION_PIPELINES", "TEXT_TO_IMAGE", "pipeline_of", "task_of", "write_diffusion"]

TEXT_TO_IMAGE, CLASS_TO_IMAGE = "text-to-image", "class-to-image"
_XL = "StableDiffusionXLPipeline"
_MOST_IMAGES = 16
_FLUX_SIZE = 128  # of latents: diffusers' default_sample_size


@dataclass(frozen=True)
class _Pipeline:
    """How a class of pipelines is written.

    Args:
        part: The denoiser's folder.
        classes: Of the denoiser, in diffusers.
        predictor: Makes a method's module of it.
        text: Writes the text encoders; None: the model reads a class's number.
        guidance_scale: Where a call names none: diffusers' default.
        num_inference_steps: Likewise.
        packing: Latents on an edge that it reads as one.
        is_flow: Whether it predicts the velocity (flow matching).
        has_wide_decoder: Whether values of the decoder may exceed float16.
        norm_type: Of the denoiser's config.
        fixed_schedule: What diffusers' pipeline sets, other than the scheduler's config.
    """

    part: str
    classes: tuple[str, ...]
    predictor: type[Predictor]
    text: Callable[[PipelineFolder], TextPart] | None
    guidance_scale: float
    num_inference_steps: int
    packing: int = 1
    is_flow: bool = False
    has_wide_decoder: bool = False
    norm_type: str | None = None
    fixed_schedule: Mapping[str, Any] | None = None


_UNET = ("unet", ("UNet2DConditionModel",))
_PIXART = partial(
    _Pipeline, "transformer", ("Transformer2DModel", "PixArtTransformer2DModel"), MaskedPredictor, guidance_scale=4.5,
    num_inference_steps=20, norm_type="ada_norm_single",
)  # fmt: skip
_PIPELINES = {
    "StableDiffusionPipeline": _Pipeline(
        *_UNET, UNetPredictor, clip, 7.5, 50, fixed_schedule={"offset": 1, "clip": None}
    ),
    _XL: _Pipeline(*_UNET, PooledPredictor, clip_pair, 5.0, 50, has_wide_decoder=True),
    "StableDiffusion3Pipeline": _Pipeline(
        "transformer", ("SD3Transformer2DModel",), JointPredictor, clips_t5, 7.0, 28, is_flow=True
    ),
    "PixArtAlphaPipeline": _PIXART(text=partial(t5, length=120)),
    "PixArtSigmaPipeline": _PIXART(text=partial(t5, length=300), has_wide_decoder=True),
    "FluxPipeline": _Pipeline(
        "transformer", ("FluxTransformer2DModel",), FluxPredictor, clip_t5, 3.5, 28, packing=2, is_flow=True
    ),
    "DiTPipeline": _Pipeline(
        "transformer", ("Transformer2DModel", "DiTTransformer2DModel"), ClassPredictor, None, 4.0, 50,
        norm_type="ada_norm_zero",
    ),
}  # fmt: skip
DIFFUSION_PIPELINES = {
    task: tuple(name for name, pipeline in _PIPELINES.items() if (pipeline.text is None) == (task == CLASS_TO_IMAGE))
    for task in (TEXT_TO_IMAGE, CLASS_TO_IMAGE)
}


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


def task_of(name: str) -> str:
    """Of a pipeline's class, also of one that is not served."""
    return CLASS_TO_IMAGE if name in DIFFUSION_PIPELINES[CLASS_TO_IMAGE] else TEXT_TO_IMAGE


def write_diffusion(path: Path, name: str, dtype: torch.dtype | None) -> Made:
    """Height and width are those of the denoiser's config.

    Raises CompileError if the pipeline or its scheduler is not served, UnsupportedError without diffusers.
    """
    if name not in _PIPELINES:
        raise CompileError(
            f"export_folder: {path}: expected {', '.join(_PIPELINES)}, got {name}: write a script for "
            "untorch export SCRIPT:FUNCTION"
        )
    pipeline, folder = _PIPELINES[name], PipelineFolder(path, dtype)
    schedule = _schedule(pipeline, folder)
    diffusers = import_library("diffusers")
    model = _denoiser(pipeline, folder, diffusers)
    vae = folder.load(diffusers.AutoencoderKL, "vae")
    if pipeline.part == "unet":
        _check_unet(path, name, model.config, vae.config)
    if pipeline.has_wide_decoder and folder.kind == torch.float16 and vae.config.force_upcast:
        vae = vae.float()
    text = _class_part(folder) if pipeline.text is None else pipeline.text(folder)
    shape = _latent_shape(pipeline, folder)
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    predictor = pipeline.predictor(model, (shape[1] * scale, shape[2] * scale))
    guidance = {None: "classifier-free", True: "embedded", False: "none"}[model.config.get("guidance_embeds")]
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    methods = {"encode_text": text.method} if text.method else {}
    methods["predict"] = _predict_method(predictor, latents, text.outputs, guidance == "embedded")
    methods["decode"] = {"model": Decoder(vae), "args": (latents[:1],)}
    section = {
        "latent_shape": [*shape], "schedule": schedule, "conditions": [*text.outputs], "guidance": guidance,
        "guidance_scale": pipeline.guidance_scale, "num_inference_steps": pipeline.num_inference_steps, **text.section,
    }  # fmt: skip
    return Made(methods, section, text.files)


def _schedule(pipeline: _Pipeline, folder: PipelineFolder) -> dict[str, Any]:
    if not pipeline.is_flow:
        found, fixed = read_schedule(folder.path), pipeline.fixed_schedule or {}
        return found | {name: value for name, value in fixed.items() if name in found}

    def count_tokens() -> int:
        _, height, width = _latent_shape(pipeline, folder)
        patch = int(folder.json(f"{pipeline.part}/config.json").get("patch_size", 1)) * pipeline.packing
        return (height // patch) * (width // patch)

    return read_flow_schedule(folder.path, count_tokens, to_zero=pipeline.packing > 1)


def _latent_shape(pipeline: _Pipeline, folder: PipelineFolder) -> tuple[int, int, int]:
    """Channels, height and width. Raises CompileError if the denoiser's config does not say them."""
    config, packing = folder.json(f"{pipeline.part}/config.json"), pipeline.packing
    channels, size = config.get("in_channels"), config.get("sample_size", _FLUX_SIZE if packing > 1 else None)
    sizes: list[Any] = size if isinstance(size, list) else [size, size]
    if not isinstance(channels, int) or not all(isinstance(one, int) and one % packing == 0 for one in sizes):
        raise CompileError(
            f"export_folder: {folder.path}: {pipeline.part}/config.json: expected in_channels and sample_size"
            f"{', a multiple of 2' if packing > 1 else ''}, got {channels!r} and {size!r}"
        )
    return channels // packing**2, int(sizes[0]), int(sizes[-1])


def _denoiser(pipeline: _Pipeline, folder: PipelineFolder, diffusers: Any) -> Any:
    config = folder.json(f"{pipeline.part}/config.json")
    found, norm = config.get("_class_name"), config.get("norm_type")
    if found not in pipeline.classes or pipeline.norm_type not in (None, norm):
        more = "" if pipeline.norm_type is None else f' with norm_type "{pipeline.norm_type}"'
        got = f"{found} with {norm!r}" if more else found
        raise CompileError(
            f"export_folder: {folder.path}: {pipeline.part}/config.json: _class_name: expected "
            f"{' or '.join(pipeline.classes)}{more}, got {got}: write a script for untorch export SCRIPT:FUNCTION"
        )
    return folder.load(getattr(diffusers, str(found)), pipeline.part)


def _check_unet(folder: Path, name: str, unet: Any, vae: Any) -> None:
    """Of configs. Raises CompileError for a U-Net or an autoencoder that reads what the pipeline does not give."""
    added = "text_time" if name == _XL else None
    reads_scale = name != _XL and unet.time_cond_proj_dim is not None  # of guidance
    if unet.addition_embed_type != added or unet.class_embed_type is not None or reads_scale:
        more = ", a pooled text and sizes" if name == _XL else ""
        problem = "reads more than" if name != _XL else "does not read, or reads more than,"
        raise CompileError(f"export_folder: {folder}: its U-Net {problem} latents, a time step and a text{more}")
    if name == _XL and (unet.time_cond_proj_dim is not None or getattr(vae, "latents_mean", None) is not None):
        raise CompileError(
            f"export_folder: {folder}: expected a U-Net without time_cond_proj_dim and an autoencoder without "
            "latents_mean: write a script for untorch export SCRIPT:FUNCTION"
        )


def _class_part(folder: PipelineFolder) -> TextPart:
    """Labels of model_index.json, by number, if it has any. Raises CompileError."""
    count = folder.json("transformer/config.json").get("num_embeds_ada_norm")
    names = folder.index().get("id2label") or {}
    if not isinstance(count, int) or not isinstance(names, dict) or {*names} != {str(one) for one in range(len(names))}:
        raise CompileError(
            f"export_folder: {folder.path}: expected num_embeds_ada_norm in transformer/config.json, and in "
            f'model_index.json no id2label or labels for "0", "1" and so on, got {count!r} and {names!r:.80}'
        )
    labels = [str(names[str(one)]) for one in range(len(names))]
    return TextPart({}, {"labels": labels, "no_class": count}, {}, {"class_labels": ()})


def _predict_method(
    predictor: Predictor, latents: torch.Tensor, outputs: dict[str, tuple[int, ...]], reads_guidance: bool
) -> dict[str, Any]:
    """outputs: of encode_text, names and shapes without the batch; (): numbers of classes."""
    from torch.export import Dim

    batch = {0: Dim("batch", min=1, max=_MOST_IMAGES)}
    generator = torch.Generator().manual_seed(1)
    conditions = [
        torch.rand(len(latents), *shape, generator=generator) if shape else torch.zeros(len(latents), dtype=torch.int64)
        for shape in outputs.values()
    ]
    args = (latents, torch.tensor([1.0]), *conditions)
    axes: tuple[Any, ...] = (batch, None, *(batch for _ in conditions))
    if reads_guidance:
        args, axes = (*args, torch.tensor([1.0])), (*axes, None)
    return {"model": predictor, "args": args, "dynamic_shapes": axes}
