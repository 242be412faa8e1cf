"""Texts as padded token ids, by the package's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.extras import import_extra
from untorch.pipeline.settings import TOKENIZER, Settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError
from untorch.runtime.program import Program

__all__ = ["Tokens"]

_CUT = "cut the text, or pass truncation=True"
_FEATURES = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class Tokens:
    """Encodes batches of texts as the inputs that the package's method has."""

    def __init__(self, program: Program, settings: Settings, file: str = TOKENIZER) -> None:
        self._settings = settings
        self.max_length: int = settings.get("max_length", int)
        self._fixed: int | None = settings.optional("fixed_length", int)
        self.multiple = 1  # of which lengths are, unless a call says otherwise
        self.inputs: list[str] = settings.texts("text_inputs")
        if unknown := [name for name in self.inputs if name not in _FEATURES]:
            raise settings.damaged(f"text_inputs: unknown {unknown[0]!r:.80}")
        self.pad_id: int = settings.get("pad_id", int)
        self.pads_left = settings.get("padding_side", str) == "left"
        tokenizers = import_extra("tokenizers", "tokenizers", "text")
        try:
            self.backend: Any = tokenizers.Tokenizer.from_buffer(program._program.entry(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidFileError(f"{program.path}: {file} is damaged: {error}") from None
        self.backend.no_padding()
        self.backend.no_truncation()
        # One of its own: calls of several threads may want both.
        self._truncating: Any = tokenizers.Tokenizer.from_str(self.backend.to_str())
        self._truncating.enable_truncation(self.max_length)

    def encode(
        self,
        texts: Sequence[Any],
        truncation: bool = False,
        *,
        name: str = "inputs",
        first: int = 0,
        advice: str = _CUT,
    ) -> list[Any]:
        """Encodings of tokenizers. A text is a string, or a dictionary of "text" and "text_pair".

        Args:
            texts: The texts.
            truncation: Whether longer texts are cut.
            name: For errors: the argument that has the texts.
            first: For errors: the place of the first text in that argument.
            advice: For errors: what to do about a text that is too long.

        Raises:
            InvalidArgumentError: A text is too long and not to be truncated, or has a lone surrogate.
            ArgumentTypeError: It is no text.
        """
        if not isinstance(truncation, bool):
            raise InvalidArgumentError(f"pipeline: truncation: expected True or False, got {truncation!r:.80}")
        backend = self._truncating if truncation or self._fixed is not None else self.backend
        places = [f"{name}[{index}]" if len(texts) > 1 else name for index in range(first, first + len(texts))]
        given = [_read(text, place) for text, place in zip(texts, places, strict=True)]
        try:
            found: list[Any] = backend.encode_batch(given)
        except TypeError:
            for text, place in zip(given, places, strict=True):
                _check_unicode(text, place)
            raise
        for index, encoding in enumerate(found, first):
            if len(encoding.ids) > self.max_length:
                raise InvalidArgumentError(
                    f"pipeline: {name}[{index}]: expected at most {self.max_length} tokens, got {len(encoding.ids)}: "
                    f"{advice}"
                )
        return found

    @property
    def ignores_padding(self) -> bool:
        """Whether a row that is padded is the same row to the method: it knows what is padding."""
        return "attention_mask" in self.inputs and not self.pads_left

    def arrays(self, encodings: Sequence[Any], multiple: int | None = None) -> dict[str, NDArray[np.int64]]:
        """The method's inputs, [batch, longest] int64, where the longest is a multiple, or the most that is read."""
        multiple = self.multiple if multiple is None else multiple
        longest = max(1, *(len(encoding.ids) for encoding in encodings))
        width = self._fixed or max(longest, min(-(-longest // multiple) * multiple, self.max_length))
        found = {}
        for name in self.inputs:
            pad = self.pad_id if name == "input_ids" else 0
            array = np.full((len(encodings), width), pad, np.int64)
            for row, encoding in zip(array, encodings, strict=True):
                values = getattr(encoding, _FEATURES[name])
                if self.pads_left:
                    row[width - len(values) :] = values
                else:
                    row[: len(values)] = values
            found[name] = array
        return found

    def rows(self, output: NDArray[Any], encodings: Sequence[Any]) -> list[NDArray[Any]]:
        """[batch, longest, …] → for each text [its tokens, …]."""
        if self.pads_left:
            return [row[len(row) - len(one.ids) :] for row, one in zip(output, encodings, strict=True)]
        return [row[: len(one.ids)] for row, one in zip(output, encodings, strict=True)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text, with the spaces before punctuation taken out if the package's tokenizer does so."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if self._settings.get("clean_up_spaces", bool):
            for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
                text = text.replace(spaced, spaced.strip())
        return text

    def join(self, tokens: Sequence[str]) -> str:
        """The text that tokens stand for."""
        decoder = self.backend.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(list(tokens))
        return text


def _check_unicode(given: Any, place: str) -> None:
    """Of a text, or of a pair. Raises InvalidArgumentError."""
    for text in (given,) if isinstance(given, str) else given:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"pipeline: {place}: expected Unicode text, got a lone surrogate, {text[error.start]!r}, at "
                f'{error.start}: decode bytes with errors="replace"'
            ) from None


def _read(text: Any, place: str) -> Any:
    if isinstance(text, str):
        return text
    if isinstance(text, dict) and text.keys() <= {"text", "text_pair"} and isinstance(text.get("text"), str):
        pair = text.get("text_pair")
        if pair is None:
            return text["text"]
        if isinstance(pair, str):
            return text["text"], pair
    raise ArgumentTypeError(
        f'pipeline: {place}: expected a string, {{"text": …, "text_pair": …}}, or a list of them, got '
        f"{type(text).__name__} {text!r:.80}"
    )
