"""A tiny Stable Diffusion and a tiny XL with random weights, by diffusers from build/diffusers or where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = [
    "draw_by_numpy",
    "import_diffusers",
    "make_folder",
    "make_pipeline",
    "make_tokenizer",
    "make_xl_folder",
    "run_calls",
    "run_eagerly",
    "scheduler_config",
]

RUN = """
import sys
sys.modules["torch"] = None
import json, numpy, untorch
job = json.load(open(sys.argv[1]))
latents = numpy.load(job["latents"])
with untorch.pipeline(job["package"]) as pipeline:
    images = [pipeline(text, latents=latents, output_type="np", **options) for text, options in job["calls"]]
    again = [pipeline(job["calls"][0][0], seed=seed, num_inference_steps=1) for seed in (1, 1, 2)]
size = (2 * latents.shape[2], 2 * latents.shape[1])
assert again[0].size == size and again[0].tobytes() == again[1].tobytes() != again[2].tobytes()
numpy.save(job["images"], numpy.stack(images))
"""
ROOT = Path(__file__).resolve().parents[1]
WORDS = ["a", "cat", "dog", "on", "mat", "photo", "of", "red", "the"]
TEXT = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "projection_dim": 16,
}  # fmt: skip
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 100}


def import_diffusers() -> Any:
    """None where it is not there."""
    if (ROOT / "build" / "diffusers" / "diffusers").is_dir() and str(ROOT / "build" / "diffusers") not in sys.path:
        sys.path.append(str(ROOT / "build" / "diffusers"))
    try:
        import diffusers
    except ImportError:
        return None
    return diffusers


def draw_by_numpy(patch: Any, scheduler: Any, seed: int) -> None:
    """Noise between a scheduler's steps, as numpy draws it of the seed. patch: pytest's MonkeyPatch."""
    import torch

    random = np.random.default_rng(seed)

    def draw(shape: Any, **_: Any) -> Any:
        return torch.from_numpy(random.standard_normal(tuple(shape), np.float32))

    patch.setattr(sys.modules[type(scheduler).__module__], "randn_tensor", draw, raising=False)


def scheduler_config(folder: Path, name: str, **fields: Any) -> None:
    """Writes scheduler/scheduler_config.json."""
    (folder / "scheduler").mkdir(exist_ok=True)
    config = {"_class_name": name, **SCHEDULE, **fields}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))


def make_tokenizer(pad: str = "<|endoftext|>") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<|endoftext|>", "<|startoftext|>", "[UNK]", *WORDS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<|startoftext|>", 1), ("<|endoftext|>", 0)]
    backend.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|startoftext|>", eos_token="<|endoftext|>", pad_token=pad,
        unk_token="[UNK]", model_max_length=8,
    )  # fmt: skip


def make_autoencoder(diffusers: Any, folder: Path) -> None:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, sample_size=16, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )  # fmt: skip
    vae.save_pretrained(folder / "vae")


def make_folder(diffusers: Any, folder: Path) -> None:
    """8 × 8 latents, 16 × 16 pixels; PLMS."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    CLIPTextModel(CLIPTextConfig(**TEXT)).eval().save_pretrained(folder / "text_encoder")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    unet.save_pretrained(folder / "unet")
    make_autoencoder(diffusers, folder)
    make_tokenizer().save_pretrained(folder / "tokenizer")
    # As published, with a member of another scheduler.
    scheduler_config(
        folder, "PNDMScheduler", steps_offset=1, clip_sample=False, set_alpha_to_one=False, skip_prk_steps=True,
        trained_betas=None,
    )  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))


def make_xl_folder(diffusers: Any, folder: Path) -> None:
    """Two text encoders of 16 and 32 values a token; 8 × 8 latents, 16 × 16 pixels; Euler's method."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    CLIPTextModel(CLIPTextConfig(**{**TEXT, "hidden_size": 16})).eval().save_pretrained(folder / "text_encoder")
    CLIPTextModelWithProjection(CLIPTextConfig(**TEXT)).eval().save_pretrained(folder / "text_encoder_2")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=48, attention_head_dim=4, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8, use_linear_projection=True,
    )  # fmt: skip
    unet.save_pretrained(folder / "unet")
    make_autoencoder(diffusers, folder)
    make_tokenizer().save_pretrained(folder / "tokenizer")
    make_tokenizer(pad="[UNK]").save_pretrained(folder / "tokenizer_2")
    # As published, with members of other schedulers.
    scheduler_config(
        folder, "EulerDiscreteScheduler", steps_offset=1, timestep_spacing="leading", interpolation_type="linear",
        use_karras_sigmas=False, clip_sample=False, set_alpha_to_one=False, skip_prk_steps=True, trained_betas=None,
    )  # fmt: skip
    index = {"_class_name": "StableDiffusionXLPipeline", "force_zeros_for_empty_prompt": True}
    (folder / "model_index.json").write_text(json.dumps(index))


def make_pipeline(diffusers: Any, folder: Path) -> Any:
    """diffusers' pipeline of a folder that was made here."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    kind = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())["_class_name"]
    parts = {
        "vae": diffusers.AutoencoderKL.from_pretrained(folder / "vae"),
        "unet": diffusers.UNet2DConditionModel.from_pretrained(folder / "unet"),
        "text_encoder": CLIPTextModel.from_pretrained(folder / "text_encoder"),
        "tokenizer": make_tokenizer(),
        "scheduler": getattr(diffusers, kind).from_pretrained(folder / "scheduler"),
    }
    if (folder / "text_encoder_2").is_dir():
        second = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2")
        return diffusers.StableDiffusionXLPipeline(
            **parts, text_encoder_2=second, tokenizer_2=make_tokenizer(pad="[UNK]"), add_watermarker=False
        )
    return diffusers.StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )


def run_calls(
    package: Path, latents: np.ndarray, calls: Sequence[tuple[str, dict[str, Any]]], folder: Path
) -> np.ndarray:
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


def run_eagerly(name: str, folder: Path, dtype: Any = None) -> Any:
    """The package's front end on the recipe's modules, without a compile."""
    import torch

    from untorch.export.recipes.diffusion.pipelines import task_of, write_diffusion
    from untorch.pipeline.load import PIPELINES
    from untorch.pipeline.settings import Settings

    made = write_diffusion(folder, name, dtype)
    section = json.loads(json.dumps({"task": task_of(name), "architecture": name, **made.section}))
    program: Any = SimpleNamespace(path="m.pt2", _program=SimpleNamespace(entry=made.files.__getitem__))

    def invoke(method: str, arguments: Any) -> list[Any]:
        given = {key: torch.from_numpy(array) for key, array in arguments.items()}
        with torch.no_grad():
            found = made.methods[method]["model"](**given)
        return [one.numpy() for one in (found if isinstance(found, tuple) else (found,))]

    pipeline: Any = PIPELINES[task_of(name)](program, Settings(section, "m.pt2"), False)
    pipeline.invoke = invoke
    return pipeline
