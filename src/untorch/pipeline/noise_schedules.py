"""Samplers of diffusion models: DDIM (Song et al., 2020) and Euler's method (Karras et al., 2022, algorithm 2).

A schedule is a dictionary: "kind" ("ddim" or "euler"), "alphas" (products of 1 - β, one a training step), "prediction"
("epsilon", "v_prediction" or "sample"), "spacing" ("leading", "trailing" or "linspace"), "offset", and for DDIM
"final_alpha" and "clip" (None: not clipped).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PREDICTIONS", "SPACINGS", "Ddim", "Euler", "make_sampler"]

PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")
Array = NDArray[np.float32]


def make_sampler(schedule: Mapping[str, Any], steps: int) -> Ddim | Euler:
    """Of a package's schedule. Raises KeyError, TypeError or ValueError for one that is damaged."""
    if schedule["prediction"] not in PREDICTIONS or schedule["spacing"] not in SPACINGS:
        raise ValueError(f"prediction {schedule['prediction']!r:.80}, spacing {schedule['spacing']!r:.80}")
    if schedule["kind"] not in ("ddim", "euler"):
        raise ValueError(f"kind {schedule['kind']!r:.80}")
    return (Ddim if schedule["kind"] == "ddim" else Euler)(schedule, steps)


def _timesteps(schedule: Mapping[str, Any], count: int, steps: int) -> NDArray[np.float64]:
    """From noise to image: places among the training steps, not rounded for "linspace"."""
    if schedule["spacing"] == "leading":
        return (np.arange(steps) * (count // steps))[::-1].astype(np.float64) + int(schedule["offset"])
    if schedule["spacing"] == "trailing":
        return np.round(np.arange(count, 0, -count / steps)) - 1
    return np.linspace(0, count - 1, steps)[::-1]


class _Sampler:
    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        self.alphas = np.asarray(schedule["alphas"], np.float64)
        if self.alphas.ndim != 1 or not 1 <= steps <= len(self.alphas) or not (self.alphas > 0).all():
            raise ValueError(f"expected 1 to {len(self.alphas)} steps, got {steps}")
        self.prediction: str = schedule["prediction"]
        self.timesteps = _timesteps(schedule, len(self.alphas), steps)


class Ddim(_Sampler):
    """Without noise between the steps (η = 0)."""

    initial_scale = 1.0

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        self.timesteps = np.round(self.timesteps)
        self._stride = len(self.alphas) // steps
        self._final, self._clip = float(schedule["final_alpha"]), schedule["clip"]

    def scale(self, latents: Array, index: int) -> Array:
        """What the model reads."""
        return latents

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        time = int(self.timesteps[index])
        before = time - self._stride
        alpha = float(self.alphas[time])
        previous = float(self.alphas[before]) if before >= 0 else self._final
        signal, noise = np.float32(alpha**0.5), np.float32((1 - alpha) ** 0.5)
        image: Any
        error: Any
        if self.prediction == "epsilon":
            image, error = (latents - noise * output) / signal, output
        elif self.prediction == "sample":
            image, error = output, (latents - signal * output) / noise
        else:
            image, error = signal * latents - noise * output, signal * output + noise * latents
        if self._clip is not None:
            image = np.clip(image, np.float32(-self._clip), np.float32(self._clip))
        found: Array = np.float32(previous**0.5) * image + np.float32((1 - previous) ** 0.5) * error
        return found


class Euler(_Sampler):
    """On the probability flow's differential equation, in σ."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        sigmas = ((1 - self.alphas) / self.alphas) ** 0.5
        self.sigmas = np.append(np.interp(self.timesteps, np.arange(len(sigmas)), sigmas), 0.0)
        largest = float(self.sigmas.max())
        self.initial_scale = (largest**2 + 1) ** 0.5 if schedule["spacing"] == "leading" else largest

    def scale(self, latents: Array, index: int) -> Array:
        """What the model reads: of variance 1."""
        found: Array = latents / np.float32((self.sigmas[index] ** 2 + 1) ** 0.5)
        return found

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        sigma, following = float(self.sigmas[index]), float(self.sigmas[index + 1])
        if self.prediction == "epsilon":
            image = latents - np.float32(sigma) * output
        elif self.prediction == "sample":
            image = output
        else:
            square = sigma**2 + 1
            image = np.float32(-sigma / square**0.5) * output + latents / np.float32(square)
        found: Array = latents + (latents - image) / np.float32(sigma) * np.float32(following - sigma)
        return found
