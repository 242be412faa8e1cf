"""Tiny pipelines of diffusion transformers with random weights, in folders as diffusers saves them."""

from __future__ import annotations

import json
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.diffusion_models import TEXT, make_tokenizer

__all__ = ["MAKERS", "drop_t5", "latent_shape", "load_pipeline"]

_T5 = {"vocab_size": 12, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2, "pad_token_id": 0}
# As PixArt's.
_DPM = {
    "algorithm_type": "dpmsolver++", "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02,
    "num_train_timesteps": 100, "solver_order": 2, "timestep_spacing": "linspace",
}  # fmt: skip


def _strong(model: Any) -> Any:
    """With larger weights: random ones all but ignore texts and times."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model.eval()


def _vae(diffusers: Any, channels: int, scale: float, shift: float | None) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=channels, sample_size=16, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=scale,
        shift_factor=shift, use_quant_conv=shift is None, use_post_quant_conv=shift is None, mid_block_add_attention=False,
    )  # fmt: skip


def _clip(kind: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(transformers.CLIPTextConfig(**{**TEXT, **fields})).eval()


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_T5)).eval()


def make_sd3(diffusers: Any, folder: Path) -> None:
    """16 channels of 8 × 8 latents, 16 × 16 pixels; one of its layers attends twice, as Stable Diffusion 3.5 medium's."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=24, pos_embed_max_size=6,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    diffusers.StableDiffusion3Pipeline(
        transformer=_strong(transformer), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(diffusers, 16, 1.5305, 0.0609),
        text_encoder=_clip("CLIPTextModelWithProjection", hidden_size=8, projection_dim=8),
        text_encoder_2=_clip("CLIPTextModelWithProjection", hidden_size=16),
        text_encoder_3=_t5(), tokenizer=make_tokenizer(), tokenizer_2=make_tokenizer(pad="[UNK]"),
        tokenizer_3=make_tokenizer(),
    ).save_pretrained(folder)  # fmt: skip


def drop_t5(folder: Path) -> None:
    """Stable Diffusion 3 without its largest text encoder."""
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))


def _make_pixart(diffusers: Any, folder: Path, kind: str, size: int, patch: int) -> None:
    fields = {
        "sample_size": size, "patch_size": patch, "in_channels": 4, "out_channels": 8, "num_layers": 1,
        "num_attention_heads": 2, "attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 32,
    }  # fmt: skip
    getattr(diffusers, kind)(
        transformer=_strong(diffusers.PixArtTransformer2DModel(**fields)), vae=_vae(diffusers, 4, 0.18215, None),
        scheduler=diffusers.DPMSolverMultistepScheduler(**_DPM), text_encoder=_t5(), tokenizer=make_tokenizer(),
    ).save_pretrained(folder)  # fmt: skip


def make_pixart_alpha(diffusers: Any, folder: Path) -> None:
    """128 × 128 latents, as of which it reads the image's size, too; 256 × 256 pixels. The config is as published."""
    _make_pixart(diffusers, folder, "PixArtAlphaPipeline", 128, 16)
    for name in ("transformer/config.json", "model_index.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("PixArtTransformer2DModel", "Transformer2DModel"))


def make_pixart_sigma(diffusers: Any, folder: Path) -> None:
    """8 × 8 latents, 16 × 16 pixels."""
    _make_pixart(diffusers, folder, "PixArtSigmaPipeline", 8, 2)


def make_flux(diffusers: Any, folder: Path) -> None:
    """8 × 8 latents, which its config says here, 16 × 16 pixels; guidance is an input."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    diffusers.FluxPipeline(
        transformer=_strong(transformer), vae=_vae(diffusers, 16, 0.3611, 0.1159),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        text_encoder=_clip("CLIPTextModel"), text_encoder_2=_t5(), tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer(),
    ).save_pretrained(folder)  # fmt: skip
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sample_size": 8}))


def make_dit(diffusers: Any, folder: Path) -> None:
    """8 × 8 latents, 16 × 16 pixels; three of its thousand classes have labels. The config is as published."""
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=8, num_layers=1, num_attention_heads=2,
        attention_head_dim=8, num_embeds_ada_norm=1000,
    )  # fmt: skip
    diffusers.DiTPipeline(
        transformer=_strong(transformer), vae=_vae(diffusers, 4, 0.18215, None),
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=100, clip_sample=False),
    ).save_pretrained(folder)  # fmt: skip
    file = folder / "transformer" / "config.json"
    file.write_text(file.read_text().replace("DiTTransformer2DModel", "Transformer2DModel"))
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"id2label": LABELS, "transformer": ["diffusers", "Transformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))


LABELS = {"0": "tench, Tinca tinca", "1": "goldfish", "2": "great white shark, white shark"}
MAKERS = {
    "DiTPipeline": make_dit,
    "StableDiffusion3Pipeline": make_sd3,
    "PixArtAlphaPipeline": make_pixart_alpha,
    "PixArtSigmaPipeline": make_pixart_sigma,
    "FluxPipeline": make_flux,
}


def latent_shape(folder: Path) -> tuple[int, int, int]:
    """Channels, height and width."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    packing = 4 if config["_class_name"].startswith("Flux") else 1
    return config["in_channels"] // packing, config["sample_size"], config["sample_size"]


def load_pipeline(diffusers: Any, folder: Path) -> Callable[..., Any]:
    """diffusers' pipeline of a folder: (text, latents=array, options) → array [height, width, 3]."""
    import torch

    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, kind in index.items() if kind == [None, None] and name.endswith("_3")}
    eager = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
    eager.set_progress_bar_config(disable=True)
    name = type(eager).__name__

    def call_dit(label: str | int, latents: np.ndarray, **options: Any) -> Any:
        number = label if isinstance(label, int) else eager.get_label_ids([label])[0]
        given = torch.from_numpy(latents)[None]  # which its calls draw by themselves
        with unittest.mock.patch("diffusers.pipelines.dit.pipeline_dit.randn_tensor", return_value=given):
            return eager([number], output_type="np", **options).images[0]

    def call(text: str, latents: np.ndarray, **options: Any) -> Any:
        given = torch.from_numpy(latents)[None]
        if name.startswith("PixArt"):  # bins have sizes as published alone, and cleaning needs more packages
            options |= {"use_resolution_binning": False, "clean_caption": False}
        if name == "FluxPipeline":  # takes latents as it packs them, and 128 × 128 unless a call says otherwise
            size = latents.shape[-1]
            given = eager._pack_latents(given, 1, *given.shape[1:])
            options |= {"height": size * eager.vae_scale_factor, "width": size * eager.vae_scale_factor}
        return eager(text, latents=given, output_type="np", **options).images[0]

    return call_dit if name == "DiTPipeline" else call
