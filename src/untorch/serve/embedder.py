"""A package of the task text-embedding: its front end, and its method, whose calls are batched with those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.model import Model

if TYPE_CHECKING:
    from untorch.pipeline.text import TextEmbedding

__all__ = ["MOST_CHARACTERS", "MULTIPLE", "Embedder"]

# Rows are joined where they are of equal length: calls meet more often where lengths are multiples of this.
MULTIPLE = 8
# Of a text: the tokenizer reads all of it before it is known to have too many tokens, which take a hundred bytes each.
MOST_CHARACTERS = 1 << 20


class Embedder:
    """Embeds texts and token ids as ``untorch.pipeline`` does, but refuses texts that are too long.

    Args:
        pipeline: The package's.
        model: Its method ``forward``, as it is served.
        max_rows: Rows of a call of the method.
    """

    def __init__(self, pipeline: TextEmbedding, model: Model, max_rows: int) -> None:
        self._pipeline, self._model = pipeline, model
        self._max_rows = 1 if any(port.shape[:1] == (1,) for port in model.inputs) else max_rows
        self._prefix = pipeline.default_prompt
        self._multiple = MULTIPLE if pipeline.tokens.ignores_padding else 1

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text."""
        return self._pipeline.tokens.max_length

    def encode(self, inputs: Sequence[str | list[int]]) -> tuple[list[Any], int]:
        """Encodings of texts, behind the package's prompt, or of token ids; the tokens without the prompt.

        Raises InvalidArgumentError: a text is empty or too long, or an id is not the tokenizer's.
        """
        backend = self._pipeline.tokens.backend
        vocabulary = backend.get_vocab_size()
        found, count = [], 0
        for at, given in enumerate(inputs):
            if isinstance(given, str):
                if len(given) > MOST_CHARACTERS:
                    raise InvalidArgumentError(
                        f"input[{at}]: expected at most {MOST_CHARACTERS} characters, got {len(given)}"
                    )
                encoding = backend.encode(self._prefix + given)
                count += len(backend.encode(given).ids) if self._prefix else len(encoding.ids)
            else:
                for token in given:
                    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                        raise InvalidArgumentError(
                            f"input[{at}]: expected token ids from 0 to {vocabulary - 1}, got {token!r:.80}"
                        )
                encoding = SimpleNamespace(ids=given, attention_mask=[1] * len(given), type_ids=[0] * len(given))
                count += len(given)
            if not encoding.ids:
                raise InvalidArgumentError(f"input[{at}]: expected at least one token, got none")
            found.append(encoding)
        return found, count

    async def embed(self, encodings: Sequence[Any], timeout: float | None = None) -> NDArray[np.float32]:
        """The embeddings [n, width]. Raises what a call of the method raises."""
        order = sorted(range(len(encodings)), key=lambda at: len(encodings[at].ids))
        parts = [order[begin : begin + self._max_rows] for begin in range(0, len(order), self._max_rows)]
        calls = [asyncio.ensure_future(self._call([encodings[at] for at in part], timeout)) for part in parts]
        try:
            rows = np.concatenate(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
        vectors = np.empty_like(rows)
        vectors[order] = rows
        return vectors

    async def _call(self, encodings: Sequence[Any], timeout: float | None) -> NDArray[np.float32]:
        arrays = self._pipeline.tokens.arrays(encodings, self._multiple)
        outputs = await self._model.infer(arrays, {}, timeout)
        [vectors] = outputs.values()
        return vectors.astype(np.float32, copy=False)
