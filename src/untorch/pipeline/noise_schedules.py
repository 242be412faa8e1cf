"""Samplers of diffusion models: DDIM, PNDM, Euler's method, DPM-Solver++, LCM, and Euler's method for flow matching.

A schedule is a dictionary. "kind" is "ddim" (Song et al., 2020), "plms" or "pndm" (Liu et al., 2022, arXiv:2202.09778,
without and with the Runge-Kutta warm-up), "euler" (Karras et al., 2022, algorithm 2), "euler-ancestral" (Song et al.,
2021, arXiv:2011.13456, appendix F), "dpm" (Lu et al., 2022, arXiv:2211.01095, multistep), "lcm" (Luo et al., 2023,
arXiv:2310.04378, multistep consistency sampling) or "flow" (Lipman et al., 2022). "euler-ancestral" and "lcm" add noise
between the steps.

All but "flow" have "alphas" (products of 1 - β, one a training step), "prediction" ("epsilon", "v_prediction" or
"sample"), "spacing" ("leading", "trailing" or "linspace") and "offset". DDIM and PNDM have "final_alpha" and "clip"
(None: not clipped). Euler and DPM-Solver++ have "karras" (σ as in Karras et al., equation 5) and "final_sigma";
DPM-Solver++ has "order" (1 or 2), "lower_order_final" and "euler_at_final". LCM has "clip", "original_steps" (of the
distillation) and "time_scale". "flow" has "count" (training steps), "shift" (Esser et al., 2024, equation 23) and
"smallest" (the last σ before the shift; None: one over the number of steps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PREDICTIONS",
    "SPACINGS",
    "Ddim",
    "DpmSolver",
    "Euler",
    "EulerAncestral",
    "FlowEuler",
    "Lcm",
    "Plms",
    "Pndm",
    "Sampler",
    "fewest_steps",
    "make_sampler",
    "most_steps",
]

PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")
_RHO = 7  # of Karras et al.
_FEW = 15  # steps, below which "lower_order_final" holds, as in diffusers
# Of the last outputs, the newest first: orders 1 to 4.
_ADAMS_BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
_DATA_DEVIATION = 0.5  # of Luo et al., as in diffusers
_RUNGE_KUTTA = (1 / 6, 1 / 3, 1 / 3, 1 / 6)
Array = NDArray[np.float32]


class Sampler:
    """One image's way from noise. Some samplers keep earlier outputs: each image needs its own."""

    timesteps: NDArray[np.float64]
    initial_scale: float = 1.0  # of the noise
    random: np.random.Generator  # of the noise between the steps

    def scale(self, latents: Array, index: int) -> Array:
        """What the model reads."""
        return latents

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        raise NotImplementedError

    def noise(self, latents: Array) -> Array:
        """New noise of the latents' shape."""
        return self.random.standard_normal(latents.shape, np.float32)


def make_sampler(schedule: Mapping[str, Any], steps: int, random: np.random.Generator | None = None) -> Sampler:
    """Of a package's schedule. Raises KeyError, TypeError or ValueError for one that is damaged.

    random: of the noise between the steps; None: a new one.
    """
    kind = schedule["kind"]
    if kind not in _KINDS:
        raise ValueError(f"kind {kind!r:.80}")
    found: Sampler = _KINDS[kind](schedule, steps)
    found.random = np.random.default_rng() if random is None else random
    return found


def most_steps(schedule: Mapping[str, Any]) -> int:
    """Steps that a schedule has at most. Raises KeyError, TypeError or ValueError for one that is damaged."""
    if schedule["kind"] == "flow":
        return int(schedule["count"])
    if schedule["kind"] == "lcm":
        return int(schedule["original_steps"])
    # The last of DPM-Solver++'s places is left out; an offset moves DDIM's and PNDM's up.
    is_moved = schedule["kind"] in ("ddim", "plms", "pndm") and schedule["spacing"] == "leading"
    return len(schedule["alphas"]) - int(schedule["kind"] == "dpm") - (int(schedule["offset"]) if is_moved else 0)


def fewest_steps(schedule: Mapping[str, Any]) -> int:
    """Steps that a schedule has at least."""
    return len(_RUNGE_KUTTA) if schedule["kind"] == "pndm" else 1


def _places(schedule: Mapping[str, Any], count: int, steps: int) -> NDArray[np.float64]:
    """From noise to image: places among the training steps, not rounded for "linspace"."""
    if schedule["spacing"] == "leading":
        return (np.arange(steps) * (count // steps))[::-1].astype(np.float64) + int(schedule["offset"])
    if schedule["spacing"] == "trailing":
        return np.round(np.arange(count, 0, -count / steps)) - 1
    return np.linspace(0, count - 1, steps)[::-1]


class _NoiseSampler(Sampler):
    """Of a model that was trained with noise on its images: √α · image + √(1 - α) · noise."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        if schedule["prediction"] not in PREDICTIONS or schedule["spacing"] not in SPACINGS:
            raise ValueError(f"prediction {schedule['prediction']!r:.80}, spacing {schedule['spacing']!r:.80}")
        self.alphas = np.asarray(schedule["alphas"], np.float64)
        if self.alphas.ndim != 1 or not (self.alphas > 0).all() or not 1 <= steps <= most_steps(schedule):
            raise ValueError(f"expected 1 to {most_steps(schedule)} steps, got {steps}")
        self.prediction: str = schedule["prediction"]
        self.timesteps = _places(schedule, len(self.alphas), steps)

    def image(self, output: Array, latents: Array, signal: float, noise: float) -> Array:
        """The image, as the model expects it. signal, noise: what latents have of the image and of the noise."""
        if self.prediction == "sample":
            return output
        found: Any
        if self.prediction == "epsilon":
            found = (latents - np.float32(noise) * output) / np.float32(signal)
        else:
            found = np.float32(signal) * latents - np.float32(noise) * output
        image: Array = found
        return image


def _clipped(image: Array, limit: float | None) -> Array:
    return image if limit is None else np.clip(image, np.float32(-limit), np.float32(limit))


class Ddim(_NoiseSampler):
    """Without noise between the steps (η = 0)."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        self.timesteps = np.round(self.timesteps)
        if self.timesteps[0] >= len(self.alphas):
            raise ValueError(f"expected an offset of less than {schedule['offset']} for {steps} steps")
        self._stride = len(self.alphas) // steps
        self._final, self._clip = float(schedule["final_alpha"]), schedule["clip"]

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        time = int(self.timesteps[index])
        return self.move(output, latents, time, time - self._stride)

    def move(self, output: Array, latents: Array, time: int, target: int) -> Array:
        """Latents of the training step time as those of the training step target; below 0: of the image."""
        alpha = float(self.alphas[time])
        previous = float(self.alphas[target]) if target >= 0 else self._final
        signal, noise = alpha**0.5, (1 - alpha) ** 0.5
        image = self.image(output, latents, signal, noise)
        error: Any
        if self.prediction == "epsilon":
            error = output
        elif self.prediction == "sample":
            error = (latents - np.float32(signal) * output) / np.float32(noise)
        else:
            error = np.float32(signal) * output + np.float32(noise) * latents
        image = _clipped(image, self._clip)
        found: Array = np.float32(previous**0.5) * image + np.float32((1 - previous) ** 0.5) * error
        return found


def _combine(weights: Sequence[float], outputs: Sequence[Array]) -> Array:
    """The linear combination."""
    found: Array = np.tensordot(np.asarray(weights, np.float32), np.stack(outputs), 1)
    return found


class Plms(Ddim):
    """PNDM's linear multistep method: steps of DDIM with Adams-Bashforth combinations of up to four outputs.

    The second call of the model corrects the first step by Heun's method: there is one call more than steps.
    """

    _start: Array  # the latents that a step of several calls begins with

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        self.timesteps = np.insert(self.timesteps, 1, self.timesteps[1:2])
        self._outputs: list[Array] = []  # the newest first

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model. Steps are called in order."""
        time = int(self.timesteps[index])
        if index == 1:
            mean = _combine((1 / 2, 1 / 2), (output, *self._outputs))
            return self.move(mean, self._start, time + self._stride, time)
        if index == 0:
            self._start = latents
        return self.multistep(output, latents, time)

    def multistep(self, output: Array, latents: Array, time: int) -> Array:
        """By the last four outputs, or as many as there are."""
        self._outputs = [output, *self._outputs[:3]]
        slope = _combine(_ADAMS_BASHFORTH[len(self._outputs) - 1], self._outputs)
        return self.move(slope, latents, time, time - self._stride)


class Pndm(Plms):
    """PNDM: the first three steps are of the fourth-order Runge-Kutta method, by four calls of the model each."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        if steps < fewest_steps(schedule):
            raise ValueError(f"expected at least {fewest_steps(schedule)} steps, got {steps}")
        super().__init__(schedule, steps)
        times = np.delete(self.timesteps, 1)  # without the call that corrects
        self._half = self._stride // 2
        starts, ends = times[:3], times[1:4]
        stages = np.stack([starts, ends + self._half, ends + self._half, ends], 1)
        self._warm_up = stages.size
        self.timesteps = np.append(stages, times[3:])
        self._slopes: list[Array] = []

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model. Steps are called in order."""
        time, stage = int(self.timesteps[index]), index % len(_RUNGE_KUTTA)
        if index >= self._warm_up:
            return self.multistep(output, latents, time)
        if stage == 0:
            self._start, self._slopes = latents, []
            self._outputs = [output, *self._outputs]
        self._slopes.append(output)
        slope = _combine(_RUNGE_KUTTA, self._slopes) if stage == 3 else output
        # The model is called at the step's start, twice halfway, and at its end: each time with what came before it.
        target = time - self._half if stage in (0, 2) else time
        return self.move(slope, self._start, int(self.timesteps[index - stage]), target)


def _training_sigmas(alphas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Noise over image, one a training step."""
    found: NDArray[np.float64] = ((1 - alphas) / alphas) ** 0.5
    return found


def _karras(largest: float, smallest: float, steps: int) -> NDArray[np.float64]:
    """Karras et al. (2022), equation 5."""
    found: NDArray[np.float64] = np.linspace(largest ** (1 / _RHO), smallest ** (1 / _RHO), steps) ** _RHO
    return found


class Euler(_NoiseSampler):
    """On the probability flow's differential equation, in σ. Latents are image + σ · noise."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        known = _training_sigmas(self.alphas)
        sigmas = np.interp(self.timesteps, np.arange(len(known)), known)
        if schedule.get("karras", False):
            sigmas = _karras(float(sigmas[0]), float(sigmas[-1]), steps)
            self.timesteps = np.interp(np.log(sigmas), np.log(known), np.arange(len(known)))
        self.sigmas = np.append(sigmas, float(schedule.get("final_sigma", 0.0)))
        largest = float(self.sigmas.max())
        self.initial_scale = (largest**2 + 1) ** 0.5 if schedule["spacing"] == "leading" else largest

    def scale(self, latents: Array, index: int) -> Array:
        """What the model reads: of variance 1."""
        found: Array = latents / np.float32((self.sigmas[index] ** 2 + 1) ** 0.5)
        return found

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        return self.move(output, latents, index, float(self.sigmas[index + 1]))

    def move(self, output: Array, latents: Array, index: int, target: float) -> Array:
        """Latents of another σ."""
        sigma = float(self.sigmas[index])
        signal = 1 / (sigma**2 + 1) ** 0.5
        image = self.image(output, self.scale(latents, index), signal, sigma * signal)
        found: Array = latents + (latents - image) / np.float32(sigma) * np.float32(target - sigma)
        return found


class EulerAncestral(Euler):
    """Ancestral sampling: a step of Euler's method beyond the next σ, and noise up to it."""

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        sigma, following = float(self.sigmas[index]), float(self.sigmas[index + 1])
        found = self.move(output, latents, index, following**2 / sigma)
        if following == 0:
            return found
        added = following * max(1 - (following / sigma) ** 2, 0.0) ** 0.5
        return found + np.float32(added) * self.noise(latents)


class DpmSolver(_NoiseSampler):
    """DPM-Solver++ with several steps, of order 1 or 2 by the midpoint rule."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        known = _training_sigmas(self.alphas)
        if schedule["spacing"] != "trailing":
            self.timesteps = np.round(_places(schedule, len(known), steps + 1)[:-1])
        sigmas = np.interp(self.timesteps, np.arange(len(known)), known)
        if schedule["karras"]:
            sigmas = _karras(float(known[-1]), float(known[0]), steps)
            self.timesteps = np.round(np.interp(np.log(sigmas), np.log(known), np.arange(len(known))))
        final = float(schedule["final_sigma"])
        self.sigmas = np.append(sigmas, final)
        self._order = int(schedule["order"])
        is_few = bool(schedule["lower_order_final"]) and steps < _FEW
        self._ends_lower = final == 0 or is_few or bool(schedule["euler_at_final"])
        self._before: Array | None = None  # the image that the last step expected

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model. Steps are called in order."""
        sigma, following = float(self.sigmas[index]), float(self.sigmas[index + 1])
        signal, signal_after = 1 / (sigma**2 + 1) ** 0.5, 1 / (following**2 + 1) ** 0.5
        image = self.image(output, latents, signal, sigma * signal)
        slope, before = image, self._before
        is_last = index == len(self.timesteps) - 1
        if before is not None and self._order > 1 and not (is_last and self._ends_lower):
            # h is the difference of log(signal / noise) of two steps.
            ratio = np.log(sigma / following) / np.log(float(self.sigmas[index - 1]) / sigma)
            slope = image + np.float32(0.5 * ratio) * (image - before)
        self._before = image
        decay, gain = following * signal_after / (sigma * signal), signal_after * (1 - following / sigma)
        found: Array = np.float32(decay) * latents + np.float32(gain) * slope
        return found


class Lcm(_NoiseSampler):
    """Of a latent consistency model: each call expects the image, which gets the next step's noise."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        super().__init__(schedule, steps)
        original, count = most_steps(schedule), len(self.alphas)
        if original > count:
            raise ValueError(f"expected at most {count} original steps, got {original}")
        # Times are chosen from those of the distillation.
        chosen = original - np.floor(np.linspace(0, original, steps, endpoint=False))
        self.timesteps = chosen * (count // original) - 1
        self._time_scale, self._clip = float(schedule["time_scale"]), schedule["clip"]

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        time = int(self.timesteps[index])
        alpha, scaled = float(self.alphas[time]), time * self._time_scale
        image = _clipped(self.image(output, latents, alpha**0.5, (1 - alpha) ** 0.5), self._clip)
        # The boundary condition: at time 0 the latents are the image.
        norm = scaled**2 + _DATA_DEVIATION**2
        found: Array = np.float32(scaled / norm**0.5) * image + np.float32(_DATA_DEVIATION**2 / norm) * latents
        if index == len(self.timesteps) - 1:
            return found
        following = float(self.alphas[int(self.timesteps[index + 1])])
        return np.float32(following**0.5) * found + np.float32((1 - following) ** 0.5) * self.noise(latents)


class FlowEuler(Sampler):
    """Of a model of the velocity on straight lines: latents are (1 - σ) · image + σ · noise."""

    def __init__(self, schedule: Mapping[str, Any], steps: int) -> None:
        count, shift = most_steps(schedule), float(schedule["shift"])
        if not 1 <= steps <= count or not shift > 0:
            raise ValueError(f"expected 1 to {count} steps and a positive shift, got {steps} and {shift}")
        smallest = 1 / steps if schedule["smallest"] is None else float(schedule["smallest"])
        sigmas = np.linspace(1, smallest, steps)
        sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
        self.timesteps = sigmas * count
        self.sigmas = np.append(sigmas, 0.0)

    def step(self, output: Array, latents: Array, index: int) -> Array:
        """The latents of the next step. output: of the model."""
        found: Array = latents + np.float32(self.sigmas[index + 1] - self.sigmas[index]) * output
        return found


_KINDS: dict[str, type[Any]] = {
    "ddim": Ddim, "plms": Plms, "pndm": Pndm, "euler": Euler, "euler-ancestral": EulerAncestral, "dpm": DpmSolver,
    "lcm": Lcm, "flow": FlowEuler,
}  # fmt: skip
