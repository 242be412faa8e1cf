"""Text to image by latent diffusion: one or two text encoders, a U-Net in a loop, and the decoder of an autoencoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.base import Pipeline, read_count
from untorch.pipeline.extras import import_extra
from untorch.pipeline.noise_schedules import Ddim, Euler, make_sampler
from untorch.pipeline.settings import SECOND_TOKENIZER, Settings
from untorch.pipeline.tokens import Tokens
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["TextToImage"]

_OUTPUTS = ("pil", "np")
_SCALE = 7.5  # of guidance


class TextToImage(Pipeline):
    """A Pillow image of a text; with output_type="np" an array [height, width, 3], float32 from 0 to 1.

    num_inference_steps: 50 by default. guidance_scale: 7.5 by default, 5 of Stable Diffusion XL; up to 1: the text is
    not strengthened. negative_prompt: what the image is to be unlike. seed: equal seeds give equal images. latents: the
    noise to begin with, [channels, height, width] float32, instead of a seed.
    """

    options = ("num_inference_steps", "guidance_scale", "negative_prompt", "seed", "latents", "output_type")

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self._tokens = Tokens(program, settings)
        self._second = None
        if settings.optional("second_text", dict) is not None:  # Stable Diffusion XL
            self._second = Tokens(program, settings.part("second_text"), SECOND_TOKENIZER)
            self._has_zeros = settings.get("zeros_without_negative_prompt", bool)
        self._scale = settings.optional("guidance_scale", float) or _SCALE
        self._shape = tuple(int(size) for size in settings.get("latent_shape", list))

    def __call__(self, inputs: Any, *, batch_size: int = 8, **options: Any) -> Any:
        """As of all pipelines. The images of a list differ by their noise, also in different batches."""
        if options.get("seed") is not None:
            options["seed"] = _read_seed(options["seed"])
        return super().__call__(inputs, batch_size=batch_size, **options)

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class. An image at a time."""
        steps = read_count("num_inference_steps", options.get("num_inference_steps", 50))
        scale, kind = options.get("guidance_scale", self._scale), options.get("output_type", "pil")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not np.isfinite(scale):
            raise InvalidArgumentError(f"pipeline: guidance_scale: expected a number, got {scale!r:.80}")
        if kind not in _OUTPUTS:
            raise InvalidArgumentError(f"pipeline: output_type: expected {' or '.join(_OUTPUTS)}, got {kind!r:.80}")
        negative, random = options.get("negative_prompt"), _read_seed(options.get("seed"))
        if negative is not None and not isinstance(negative, str):
            raise ArgumentTypeError(
                f"pipeline: negative_prompt: expected a string, got {type(negative).__name__} {negative!r:.80}"
            )
        found = []
        for text in inputs:
            if not isinstance(text, str):
                raise ArgumentTypeError(f"pipeline: inputs: expected a string, got {type(text).__name__}")
            sampler = self._sampler(steps)
            latents = self._noise(options.get("latents"), random) * np.float32(sampler.initial_scale)
            conditions = self._encode(text, negative, scale > 1)
            found.append(self._image(conditions, latents, sampler, float(scale), kind))
        return found

    def _sampler(self, steps: int) -> Ddim | Euler:
        schedule = self.settings.get("schedule", dict)
        if steps > len(schedule.get("alphas", ())):
            raise InvalidArgumentError(
                f"pipeline: num_inference_steps: expected at most {len(schedule.get('alphas', ()))}, got {steps}"
            )
        try:
            return make_sampler(schedule, steps)
        except (KeyError, TypeError, ValueError) as error:
            raise self.settings.damaged(f"schedule: {error}") from None

    def _noise(self, given: Any, random: np.random.Generator) -> NDArray[np.float32]:
        if given is None:
            return random.standard_normal((1, *self._shape), np.float32)
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != self._shape:
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
            raise InvalidArgumentError(f"pipeline: latents: expected float32 {list(self._shape)}, got {got}")
        return given[None]

    def _encode(self, text: str, negative: str | None, is_guided: bool) -> dict[str, NDArray[np.float32]]:
        """What the U-Net reads beside latents and a time: of the text, in guidance after that of the negative one."""
        # Stable Diffusion XL was trained with zeros for no text.
        has_zeros = is_guided and negative is None and self._second is not None and self._has_zeros
        texts = [negative or "", text] if is_guided and not has_zeros else [text]
        arrays = self._tokens.arrays(self._tokens.encode(texts, truncation=True))
        if self._second is not None:
            second = self._second.arrays(self._second.encode(texts, truncation=True))
            arrays |= {f"{name}_2": array for name, array in second.items()}
        found = dict(zip(("hidden", "pooled"), self.call_all("encode_text", arrays), strict=False))
        if has_zeros:
            found = {name: np.concatenate([np.zeros_like(array), array]) for name, array in found.items()}
        return found

    def _image(
        self,
        conditions: Mapping[str, NDArray[np.float32]],
        latents: NDArray[np.float32],
        sampler: Ddim | Euler,
        scale: float,
        kind: str,
    ) -> Any:
        is_guided = scale > 1
        for index, time in enumerate(sampler.timesteps):
            given = np.repeat(sampler.scale(latents, index), len(conditions["hidden"]), 0)
            arguments = {"latents": given, "timestep": np.asarray([time], np.float32), **conditions}
            output = self.call("predict", arguments)
            if is_guided:
                output = output[:1] + np.float32(scale) * (output[1:] - output[:1])
            latents = np.ascontiguousarray(sampler.step(output, latents, index))
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
