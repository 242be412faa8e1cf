"""Text to image: diffusion with one to three text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from untorch.pipeline.diffusion import Conditions, Diffusion
from untorch.pipeline.prompts import Prompts
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["TextToImage"]

# Options that a model distilled from a guided one does not read.
_NOT_READ = {"embedded": ("negative_prompt",), "none": ("negative_prompt", "guidance_scale")}


class TextToImage(Diffusion):
    """An image of a text, as of all diffusion.

    guidance_scale: Flux reads it, and FLUX.1-schnell takes none. negative_prompt: what the image is to be unlike; Flux
    takes none.
    """

    options = ("num_inference_steps", "guidance_scale", "negative_prompt", "seed", "latents", "output_type")

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self._prompts = Prompts(program, settings)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError and ArgumentTypeError for options of the task."""
        for name in _NOT_READ.get(self._guidance, ()):
            if options.get(name) is not None:
                raise InvalidArgumentError(
                    f"pipeline: {name}: expected none, as this {self.architecture} was distilled to do without: leave "
                    "it out"
                )
        negative = options.get("negative_prompt")
        if negative is not None and not isinstance(negative, str):
            raise ArgumentTypeError(
                f"pipeline: negative_prompt: expected a string, got {type(negative).__name__} {negative!r:.80}"
            )

    def conditions(self, one: Any, options: Mapping[str, Any], is_guided: bool) -> Conditions:
        """Of a text."""
        if not isinstance(one, str):
            raise ArgumentTypeError(f"pipeline: inputs: expected a string, got {type(one).__name__}")
        return self._prompts.encode(self.call_all, one, options.get("negative_prompt"), is_guided)
