"""Images by latent diffusion: a denoiser in a loop, and the decoder of an autoencoder. Tasks say what they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.base import Pipeline, read_count
from untorch.pipeline.extras import import_extra
from untorch.pipeline.noise_schedules import Sampler, fewest_steps, make_sampler, most_steps
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["CLASSIFIER_FREE", "Conditions", "Diffusion"]

CLASSIFIER_FREE = "classifier-free"
Conditions = dict[str, NDArray[Any]]  # what the denoiser reads beside latents and a time
_OUTPUTS = ("pil", "np")
_GUIDANCE = (CLASSIFIER_FREE, "embedded", "none")


class Diffusion(Pipeline):
    """A Pillow image of an input; with output_type="np" an array [height, width, 3], float32 from 0 to 1.

    num_inference_steps, guidance_scale: by default, those of diffusers' pipeline. A scale up to 1 does not strengthen
    the input. seed: equal seeds give equal images. latents: the noise to begin with instead of the seed's, [channels,
    height, width] float32; what a sampler adds between the steps is of the seed.
    """

    options: tuple[str, ...] = ("num_inference_steps", "guidance_scale", "seed", "latents", "output_type")

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self._scale, self._steps = settings.get("guidance_scale", float), settings.get("num_inference_steps", int)
        self._guidance = settings.get("guidance", str)
        if self._guidance not in _GUIDANCE:
            raise settings.damaged(f"guidance: expected {' or '.join(_GUIDANCE)}, got {self._guidance!r:.80}")
        self._shape = tuple(int(size) for size in settings.get("latent_shape", list))

    def conditions(self, one: Any, options: Mapping[str, Any], is_guided: bool) -> Conditions:
        """Of an input; in guidance, of what the image is to be unlike before it."""
        raise NotImplementedError

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError and ArgumentTypeError for options of the task."""

    def __call__(self, inputs: Any, *, batch_size: int = 8, **options: Any) -> Any:
        """As of all pipelines. The images of a list differ by their noise, also in different batches."""
        if options.get("seed") is not None:
            options["seed"] = _read_seed(options["seed"])
        return super().__call__(inputs, batch_size=batch_size, **options)

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class. An image at a time."""
        steps = read_count("num_inference_steps", options.get("num_inference_steps", self._steps))
        scale, kind = options.get("guidance_scale", self._scale), options.get("output_type", "pil")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not np.isfinite(scale):
            raise InvalidArgumentError(f"pipeline: guidance_scale: expected a number, got {scale!r:.80}")
        if kind not in _OUTPUTS:
            raise InvalidArgumentError(f"pipeline: output_type: expected {' or '.join(_OUTPUTS)}, got {kind!r:.80}")
        random = _read_seed(options.get("seed"))
        self.check_options(options)
        is_guided = self._guidance == CLASSIFIER_FREE and scale > 1
        found = []
        for one in inputs:
            sampler = self._sampler(steps, random)
            latents = self._noise(options.get("latents"), random) * np.float32(sampler.initial_scale)
            conditions = self.conditions(one, options, is_guided)
            if self._guidance == "embedded":
                conditions["guidance"] = np.asarray([scale], np.float32)
            latents = self._denoise(conditions, latents, sampler, float(scale) if is_guided else None)
            found.append(self._decode(latents, kind))
        return found

    def _sampler(self, steps: int, random: np.random.Generator) -> Sampler:
        schedule = self.settings.get("schedule", dict)
        try:
            fewest, most = fewest_steps(schedule), most_steps(schedule)
            if fewest <= steps <= most:
                return make_sampler(schedule, steps, random)
        except (KeyError, TypeError, ValueError) as error:
            raise self.settings.damaged(f"schedule: {error}") from None
        expected = f"at most {most}" if steps > most else f"at least {fewest}"
        raise InvalidArgumentError(f"pipeline: num_inference_steps: expected {expected}, got {steps}")

    def _noise(self, given: Any, random: np.random.Generator) -> NDArray[np.float32]:
        if given is None:
            return random.standard_normal((1, *self._shape), np.float32)
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != self._shape:
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
            raise InvalidArgumentError(f"pipeline: latents: expected float32 {list(self._shape)}, got {got}")
        return given[None]

    def _denoise(
        self, conditions: Conditions, latents: NDArray[np.float32], sampler: Sampler, scale: float | None
    ) -> NDArray[np.float32]:
        """The image's latents. scale: of classifier-free guidance; None: without it."""
        for index, time in enumerate(sampler.timesteps):
            given = sampler.scale(latents, index)
            if scale is not None:
                given = np.repeat(given, 2, 0)
            output = self.call("predict", {"latents": given, "timestep": np.asarray([time], np.float32), **conditions})
            if scale is not None:
                output = output[:1] + np.float32(scale) * (output[1:] - output[:1])
            latents = np.ascontiguousarray(sampler.step(output, latents, index))
        return latents

    def _decode(self, latents: NDArray[np.float32], kind: str) -> Any:
        pixels = self.call("decode", {"latents": latents})[0].transpose(1, 2, 0)
        image = (pixels / 2 + np.float32(0.5)).clip(0, 1)
        if kind == "np":
            return image
        return import_extra("PIL.Image", "pillow", "an image").fromarray((image * 255).round().astype(np.uint8))


def _read_seed(seed: Any) -> np.random.Generator:
    """Raises InvalidArgumentError."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"pipeline: seed: expected an integer from 0, got {seed!r:.80}") from None
