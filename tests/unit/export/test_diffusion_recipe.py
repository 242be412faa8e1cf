"""The recipe for text to image: folders, schedulers and parts that are refused, and what its sections say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import diffusion_models
from untorch.export import CompileError, export_folder
from untorch.export.recipes.diffusion.pipelines import _check_unet, _class_part, task_of
from untorch.export.recipes.diffusion.schedules import read_flow_schedule, read_schedule
from untorch.export.recipes.diffusion.text_encoders import PipelineFolder, clips_t5
from untorch.runtime.errors import InvalidArgumentError

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
FLOW = "FlowMatchEulerDiscreteScheduler"


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        (
            "HeunDiscreteScheduler", {},
            "_class_name: expected DDIMScheduler or PNDMScheduler or EulerDiscreteScheduler or "
            "EulerAncestralDiscreteScheduler or DPMSolverMultistepScheduler or LCMScheduler, got HeunDiscreteScheduler: name one of them there, as they run models of the same training$",
        ),
        ("PNDMScheduler", {"prediction_type": "sample"}, "prediction_type: expected epsilon or v_prediction, got 'sample'$"),
        ("PNDMScheduler", {"timestep_spacing": "odd"}, "timestep_spacing: expected leading or trailing or linspace, got"),
        ("PNDMScheduler", {"use_karras_sigmas": True}, "use_karras_sigmas: expected False, got True"),
        ("DDIMScheduler", {"use_karras_sigmas": True}, "use_karras_sigmas: expected False, got True"),
        ("EulerDiscreteScheduler", {"use_beta_sigmas": True}, "use_beta_sigmas: expected False, got True"),
        ("EulerDiscreteScheduler", {"final_sigmas_type": "last"}, "final_sigmas_type: expected zero or sigma_min, got"),
        ("DDIMScheduler", {"beta_schedule": "sigmoid"}, "beta_schedule: expected linear or scaled_linear, got 'sigm"),
        ("DDIMScheduler", {"prediction_type": "flow"}, "prediction_type: expected epsilon or v_prediction or sample, g"),
        ("DDIMScheduler", {"timestep_spacing": "odd"}, "timestep_spacing: expected leading or trailing or linspace, got"),
        ("DDIMScheduler", {"trained_betas": [0.1]}, "trained_betas: expected none, got some"),
        (
            "DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"},
            r"algorithm_type: expected dpmsolver\+\+, got 'sde-dpmsolver\+\+'",
        ),
        (
            "EulerAncestralDiscreteScheduler", {"prediction_type": "sample"},
            "prediction_type: expected epsilon or v_prediction, got 'sample'$",
        ),
        (
            "EulerAncestralDiscreteScheduler", {"rescale_betas_zero_snr": True},
            "rescale_betas_zero_snr: expected False, got True",
        ),
        (
            "LCMScheduler", {"original_inference_steps": 101},
            "original_inference_steps: expected 1 to num_train_timesteps, 100, got 101$",
        ),
        ("LCMScheduler", {"thresholding": True}, "thresholding: expected False, got True"),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "solver_order: expected 1 or 2, got 3"),
        ("DPMSolverMultistepScheduler", {"solver_type": "heun"}, "solver_type: expected midpoint, got 'heun'"),
        ("DPMSolverMultistepScheduler", {"use_flow_sigmas": True}, "use_flow_sigmas: expected False, got True"),
        ("DPMSolverMultistepScheduler", {"lambda_min_clipped": -5.1}, "lambda_min_clipped: expected -inf, got -5.1"),
        ("DPMSolverMultistepScheduler", {"variance_type": "learned"}, "variance_type: expected None, got 'learned'"),
    ],
)  # fmt: skip
def test_schedules_that_are_refused(name: str, fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    diffusion_models.scheduler_config(tmp_path, name, **fields)
    with pytest.raises(CompileError, match=text):
        read_schedule(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        (
            "DDIMScheduler", {},
            f"_class_name: expected {FLOW}, got DDIMScheduler: name it there, as it runs models of the same training "
            r"\(flow matching\)$",
        ),
        (FLOW, {"use_karras_sigmas": True}, "use_karras_sigmas: expected False, got True"),
        (FLOW, {"shift_terminal": 0.02}, "shift_terminal: expected None, got 0.02"),
        (FLOW, {"stochastic_sampling": True}, "stochastic_sampling: expected False, got True"),
        (
            FLOW, {"use_dynamic_shifting": True, "time_shift_type": "cubic"},
            "time_shift_type: expected exponential or linear, got 'cubic'",
        ),
    ],
)  # fmt: skip
def test_flow_schedules_that_are_refused(name: str, fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    diffusion_models.scheduler_config(tmp_path, name, **fields)
    with pytest.raises(CompileError, match=text):
        read_flow_schedule(tmp_path, lambda: 16)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "model_index.json", _class_name="KandinskyPipeline")
    with pytest.raises(
        CompileError, match="expected StableDiffusionPipeline, StableDiffusionXL.*, got KandinskyPipeline: write a"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2")
    with pytest.raises(
        InvalidArgumentError, match="task: expected text-to-image without inputs for Kandinsky.*got 'fill-mask'"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2", task="fill-mask")
    write(tmp_path, "model_index.json", _class_name="StableDiffusionPipeline")
    with pytest.raises(InvalidArgumentError, match="expected scheduler/scheduler_config.json, got none"):
        export_folder(tmp_path, tmp_path / "m.pt2")
    write(tmp_path, "model_index.json")
    with pytest.raises(InvalidArgumentError, match='expected "_class_name" with the name of a pipeline'):
        export_folder(tmp_path, tmp_path / "m.pt2")


def test_denoisers_that_are_refused(tmp_path: Path) -> None:
    if diffusion_models.import_diffusers() is None:
        pytest.skip("make puts diffusers into build/")
    write(tmp_path, "model_index.json", _class_name="PixArtAlphaPipeline")
    diffusion_models.scheduler_config(tmp_path, "DDIMScheduler")
    with pytest.raises(CompileError, match="expected transformer/config.json, got none"):
        export_folder(tmp_path, tmp_path / "m.pt2")
    expected = 'expected Transformer2DModel or PixArtTransformer2DModel with norm_type "ada_norm_single", got '
    for kind, norm in (("DiTTransformer2DModel", "ada_norm_zero"), ("Transformer2DModel", "ada_norm_zero")):
        write(tmp_path, "transformer/config.json", _class_name=kind, norm_type=norm)
        with pytest.raises(CompileError, match=f"_class_name: {expected}{kind} with 'ada_norm_zero': write a script"):
            export_folder(tmp_path, tmp_path / "m.pt2")
    write(tmp_path, "model_index.json", _class_name="StableDiffusion3Pipeline")
    diffusion_models.scheduler_config(tmp_path, FLOW)
    with pytest.raises(CompileError, match="expected SD3Transformer2DModel, got Transformer2DModel: write a script"):
        export_folder(tmp_path, tmp_path / "m.pt2")


def test_sizes_that_are_refused(tmp_path: Path) -> None:
    """By which a dynamic shift is found, before anything is loaded."""
    diffusion_models.scheduler_config(tmp_path, FLOW, use_dynamic_shifting=True)
    for name, more, fields, got in (
        ("StableDiffusion3Pipeline", "", {"in_channels": 16}, "16 and None"),
        ("FluxPipeline", ", a multiple of 2", {"in_channels": 64, "sample_size": [8, 9]}, r"64 and \[8, 9\]"),
        ("FluxPipeline", ", a multiple of 2", {"sample_size": 8}, "None and 8"),
    ):
        write(tmp_path, "model_index.json", _class_name=name)
        write(tmp_path, "transformer/config.json", **fields)
        with pytest.raises(CompileError, match=f"config.json: expected in_channels and sample_size{more}, got {got}$"):
            export_folder(tmp_path, tmp_path / "m.pt2")


def test_a_text_encoder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "transformer/config.json", joint_attention_dim=32)
    write(tmp_path, "model_index.json", text_encoder_3=["transformers", "T5EncoderModel"])
    monkeypatch.setattr(PipelineFolder, "load_text", lambda *_: None)
    lengths = iter((8, 8, 8, 7))
    monkeypatch.setattr(
        "untorch.export.recipes.diffusion.text_encoders._front_end", lambda *_: ({"max_length": next(lengths)}, {})
    )
    with pytest.raises(CompileError) as caught:
        clips_t5(PipelineFolder(tmp_path, None))
    assert str(caught.value) == (
        f'export_folder: {tmp_path}: expected text_encoder_3, got none: write "text_encoder_3": [null, null] into '
        "model_index.json to do without it"
    )
    with pytest.raises(CompileError, match="expected one length of both tokenizers, got 8 and 7$"):
        clips_t5(PipelineFolder(tmp_path, None))


def test_tasks_of_pipelines(tmp_path: Path) -> None:
    assert [task_of(name) for name in ("FluxPipeline", "DiTPipeline")] == ["text-to-image", "class-to-image"]
    write(tmp_path, "model_index.json", _class_name="DiTPipeline")
    for given in ({"task": "text-to-image"}, {"inputs": "x=1:int64"}):
        with pytest.raises(InvalidArgumentError, match="task: expected class-to-image without inputs for DiTPipeline"):
            export_folder(tmp_path, tmp_path / "m.pt2", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [{}, ["a", "b"], {"1": "a"}, {"0": "a", "2": "b"}])
def test_labels_that_are_refused(labels: Any, tmp_path: Path) -> None:
    write(tmp_path, "transformer/config.json", num_embeds_ada_norm=1000 if labels != {} else None)
    write(tmp_path, "model_index.json", id2label=labels)
    with pytest.raises(CompileError, match='model_index.json no id2label or labels for "0", "1" and so on, got '):
        _class_part(PipelineFolder(tmp_path, None))


def test_unets_that_are_refused(tmp_path: Path) -> None:
    unet = {"addition_embed_type": "text_time", "class_embed_type": None, "time_cond_proj_dim": None}
    vae = SimpleNamespace(latents_mean=None)
    _check_unet(tmp_path, "StableDiffusionXLPipeline", SimpleNamespace(**unet), vae)
    with pytest.raises(CompileError, match="its U-Net reads more than latents, a time step and a text$"):
        _check_unet(tmp_path, "StableDiffusionPipeline", SimpleNamespace(**unet), vae)
    plain = {**unet, "addition_embed_type": None}
    _check_unet(tmp_path, "StableDiffusionPipeline", SimpleNamespace(**plain), vae)
    with pytest.raises(CompileError, match="its U-Net reads more than latents, a time step and a text$"):
        _check_unet(tmp_path, "StableDiffusionPipeline", SimpleNamespace(**{**plain, "time_cond_proj_dim": 8}), vae)
    other = SimpleNamespace(**plain)
    with pytest.raises(
        CompileError, match="its U-Net does not read, or reads more than, latents, .*, a pooled text and s"
    ):
        _check_unet(tmp_path, "StableDiffusionXLPipeline", other, vae)
    for changed, decoder in (({**unet, "time_cond_proj_dim": 8}, vae), (unet, SimpleNamespace(latents_mean=[0.0]))):
        with pytest.raises(
            CompileError, match="expected a U-Net without time_cond_proj_dim and an autoencoder without"
        ):
            _check_unet(tmp_path, "StableDiffusionXLPipeline", SimpleNamespace(**changed), decoder)
