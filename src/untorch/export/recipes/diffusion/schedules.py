"""A scheduler's config of diffusers as numbers, as ``untorch.pipeline.noise_schedules`` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.pipeline.noise_schedules import PREDICTIONS, SPACINGS
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["read_flow_schedule", "read_schedule"]

_KINDS = {
    "DDIMScheduler": "ddim", "PNDMScheduler": "pndm", "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler-ancestral", "DPMSolverMultistepScheduler": "dpm", "LCMScheduler": "lcm",
}  # fmt: skip
_FLOW = "FlowMatchEulerDiscreteScheduler"
# Of a scheduler's config: what is not served, and the value that it must have.
_ALWAYS = {"use_exponential_sigmas": False, "use_beta_sigmas": False}
_OF_NOISE = {
    **_ALWAYS, "thresholding": False, "rescale_betas_zero_snr": False, "interpolation_type": "linear",
    "timestep_type": "discrete",
}  # fmt: skip
_WITHOUT_SIGMAS = {**_OF_NOISE, "use_karras_sigmas": False, "final_sigmas_type": "zero"}
_NEUTRAL: dict[str, dict[str, Any]] = {
    "ddim": _WITHOUT_SIGMAS,
    "pndm": _WITHOUT_SIGMAS,
    "lcm": _WITHOUT_SIGMAS,
    "euler-ancestral": _WITHOUT_SIGMAS,
    "euler": _OF_NOISE,
    "dpm": {
        **_OF_NOISE, "algorithm_type": "dpmsolver++", "solver_type": "midpoint", "use_lu_lambdas": False,
        "use_flow_sigmas": False, "lambda_min_clipped": -math.inf, "variance_type": None,
    },
    "flow": {
        **_ALWAYS, "use_karras_sigmas": False, "invert_sigmas": False, "shift_terminal": None,
        "stochastic_sampling": False,
    },
}  # fmt: skip
# Where diffusers' scheduler does not have them all.
_PREDICTIONS = dict.fromkeys(("pndm", "euler-ancestral"), ("epsilon", "v_prediction"))
# Defaults; of other kinds "leading", and β from 1e-4 to 0.02 on a line.
_SPACINGS = dict.fromkeys(("euler", "euler-ancestral", "dpm"), "linspace")
_BETAS = {"lcm": ("scaled_linear", 0.00085, 0.012)}


class _Config:
    """scheduler/scheduler_config.json of a pipeline's folder."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler" / "scheduler_config.json"
        if not self.file.is_file():
            raise InvalidArgumentError(f"export_folder: {folder}: expected scheduler/scheduler_config.json, got none")
        self.values: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        self.name = str(self.values.get("_class_name"))

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def need(self, key: str, known: tuple[Any, ...], default: Any) -> Any:
        """The value. Raises CompileError if it is not one of those that are known."""
        value = self.values.get(key, default)
        if value not in known:
            raise CompileError(
                f"export_folder: {self.file}: {key}: expected {' or '.join(map(str, known))}, got {value!r}"
            )
        return value

    def need_neutral(self, kind: str) -> None:
        for key, neutral in _NEUTRAL[kind].items():
            self.need(key, (neutral,), neutral)


def read_schedule(folder: Path) -> dict[str, Any]:
    """Of a model of the noise: DDIM, PNDM, Euler's method, DPM-Solver++ or LCM. Raises CompileError."""
    config = _Config(folder)
    if config.name not in _KINDS:
        raise CompileError(
            f"export_folder: {config.file}: _class_name: expected {' or '.join(_KINDS)}, got {config.name}: name one "
            "of them there, as they run models of the same training"
        )
    kind = _KINDS[config.name]
    config.need_neutral(kind)
    if config.get("trained_betas", None) is not None:
        raise CompileError(f"export_folder: {config.file}: trained_betas: expected none, got some")
    alphas = _alphas(config, *_BETAS.get(kind, ("linear", 1e-4, 0.02)))
    schedule = {
        "kind": kind,
        "alphas": alphas.tolist(),
        "prediction": config.need("prediction_type", _PREDICTIONS.get(kind, PREDICTIONS), "epsilon"),
        "spacing": config.need("timestep_spacing", SPACINGS, _SPACINGS.get(kind, "leading")),
        "offset": int(config.get("steps_offset", 0)),
    }
    if kind in ("ddim", "lcm"):
        clips = config.get("clip_sample", kind == "ddim")
        schedule["clip"] = float(config.get("clip_sample_range", 1.0)) if clips else None
    if kind == "ddim":
        return schedule | {"final_alpha": 1.0 if config.get("set_alpha_to_one", True) else float(alphas[0])}
    if kind == "lcm":
        return schedule | _consistency(config, len(alphas))
    if kind == "euler-ancestral":
        return schedule
    if kind == "pndm":
        is_linear = bool(config.get("skip_prk_steps", False))
        return schedule | {
            "kind": "plms" if is_linear else "pndm",
            "final_alpha": 1.0 if config.get("set_alpha_to_one", False) else float(alphas[0]),
            "clip": None,
        }
    is_zero = config.need("final_sigmas_type", ("zero", "sigma_min"), "zero") == "zero"
    schedule |= {
        "karras": bool(config.get("use_karras_sigmas", False)),
        "final_sigma": 0.0 if is_zero else float((1 / alphas[0] - 1) ** 0.5),
    }
    if kind == "dpm":
        schedule |= {
            "order": config.need("solver_order", (1, 2), 2),
            "lower_order_final": bool(config.get("lower_order_final", True)),
            "euler_at_final": bool(config.get("euler_at_final", False)),
        }
    return schedule


def _consistency(config: _Config, count: int) -> dict[str, Any]:
    """Of a latent consistency model. count: of training steps."""
    original = int(config.get("original_inference_steps", 50))
    if not 1 <= original <= count:
        raise CompileError(
            f"export_folder: {config.file}: original_inference_steps: expected 1 to num_train_timesteps, {count}, got "
            f"{original}"
        )
    return {"original_steps": original, "time_scale": float(config.get("timestep_scaling", 10.0))}


def _alphas(config: _Config, shape: str, first: float, last: float) -> torch.Tensor:
    """Products of 1 - β, one a training step. shape, first and last: of β, by default."""
    count = int(config.get("num_train_timesteps", 1000))
    start, end = float(config.get("beta_start", first)), float(config.get("beta_end", last))
    if config.need("beta_schedule", ("linear", "scaled_linear"), shape) == "linear":
        betas = torch.linspace(start, end, count, dtype=torch.float32)
    else:
        betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float32) ** 2
    return torch.cumprod(1 - betas, 0)


def read_flow_schedule(folder: Path, count_tokens: Callable[[], int], *, to_zero: bool = False) -> dict[str, Any]:
    """Of a model of the velocity (flow matching). Raises CompileError.

    Args:
        folder: The pipeline's.
        count_tokens: The image's patches, by which "use_dynamic_shifting" shifts.
        to_zero: Whether the steps divide σ evenly down to zero, as Flux's; else down to the last training step's.
    """
    config = _Config(folder)
    if config.name != _FLOW:
        raise CompileError(
            f"export_folder: {config.file}: _class_name: expected {_FLOW}, got {config.name}: name it there, as it "
            "runs models of the same training (flow matching)"
        )
    config.need_neutral("flow")
    count = int(config.get("num_train_timesteps", 1000))
    smallest = 1 / count
    if config.get("use_dynamic_shifting", False):
        shift = _dynamic_shift(config, count_tokens())
    else:
        shift = float(config.get("shift", 1.0))
        smallest = shift * smallest / (1 + (shift - 1) * smallest)  # diffusers shifts it twice
    return {"kind": "flow", "count": count, "shift": shift, "smallest": None if to_zero else smallest}


def _dynamic_shift(config: _Config, tokens: int) -> float:
    """Of an image's size: on the line through the base's and the largest one's."""
    low, high = int(config.get("base_image_seq_len", 256)), int(config.get("max_image_seq_len", 4096))
    base, most = float(config.get("base_shift", 0.5)), float(config.get("max_shift", 1.15))
    mu = base + (tokens - low) * (most - base) / (high - low)
    is_exponential = config.need("time_shift_type", ("exponential", "linear"), "exponential") == "exponential"
    return math.exp(mu) if is_exponential else mu
