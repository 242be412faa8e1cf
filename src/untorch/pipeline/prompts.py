"""Prompts of text-to-image as what the denoiser reads: token ids of one or more tokenizers, and their encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.settings import MORE_TOKENIZERS, Settings
from untorch.pipeline.tokens import Tokens
from untorch.runtime.program import Program

__all__ = ["Prompts"]


class Prompts:
    """Encodes a prompt, and in classifier-free guidance the negative one before it."""

    def __init__(self, program: Program, settings: Settings) -> None:
        self._tokens = [Tokens(program, settings)]
        more = settings.optional("more_texts", list) or []
        if len(more) > len(MORE_TOKENIZERS) or not all(isinstance(one, dict) for one in more):
            raise settings.damaged(
                f"more_texts: expected at most {len(MORE_TOKENIZERS)} dictionaries, got {more!r:.80}"
            )
        for file, values in zip(MORE_TOKENIZERS, more, strict=False):
            self._tokens.append(Tokens(program, settings.at(values), file))
        self._names = settings.texts("conditions")
        # Stable Diffusion XL was trained with zeros for no text.
        self._has_zeros = bool(settings.optional("zeros_without_negative_prompt", bool))
        self._is_lower = bool(settings.optional("lower_case", bool))

    def encode(
        self,
        call: Callable[[str, Mapping[str, Any]], list[NDArray[np.float32]]],
        text: str,
        negative: str | None,
        is_guided: bool,
    ) -> dict[str, NDArray[np.float32]]:
        """What the denoiser reads beside latents and a time, by name. call: a method's outputs."""
        has_zeros = is_guided and negative is None and self._has_zeros
        texts = [negative or "", text] if is_guided and not has_zeros else [text]
        found = dict(zip(self._names, call("encode_text", self._arrays(texts)), strict=True))
        if has_zeros:
            found = {name: np.concatenate([np.zeros_like(array), array]) for name, array in found.items()}
        return found

    def _arrays(self, texts: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        if self._is_lower:
            texts = [text.lower().strip() for text in texts]
        arrays: dict[str, NDArray[np.int64]] = {}
        for place, tokens in enumerate(self._tokens, 1):
            found = tokens.arrays(tokens.encode(texts, truncation=True))
            arrays |= {name if place == 1 else f"{name}_{place}": array for name, array in found.items()}
        return arrays
