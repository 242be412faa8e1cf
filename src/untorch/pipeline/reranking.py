"""Reranking: how well each of some documents answers a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.base import numbered, read_count
from untorch.pipeline.scores import activate, activation_of
from untorch.pipeline.text import TextPipeline
from untorch.runtime.errors import ArgumentTypeError

__all__ = ["Reranking"]

_BATCH = 32  # pairs of a call
_OF_INPUTS = ("pipeline: inputs: ", "pipeline: documents")  # begins of texts of errors


class Reranking(TextPipeline):
    """``[{"index": …, "score": …, "document": …}]``, the best first, of ``{"query": …, "documents": […]}``.

    top_k: how many. Pairs are truncated by default, as sentence-transformers does.
    """

    options = ("top_k", "function_to_apply", "truncation")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        top_k = options.get("top_k")
        if top_k is not None:
            read_count("top_k", top_k)
        name = activation_of(options, self.settings)
        truncation, found = options.get("truncation", True), []
        for index, given in enumerate(inputs):
            with numbered(index if is_list else None, _OF_INPUTS):
                query, documents = _read(given)
                scores = activate(self._logits(query, documents, truncation), name)
            order = np.argsort(-scores, kind="stable")[:top_k]
            found.append([{"index": int(i), "score": float(scores[i]), "document": documents[i]} for i in order])
        return found

    def _logits(self, query: str, documents: Sequence[str], truncation: bool) -> NDArray[np.float32]:
        """Of each document."""
        pairs = [{"text": query, "text_pair": document} for document in documents]
        rows = [np.empty(0, np.float32)]
        for begin in range(0, len(pairs), _BATCH):
            part = pairs[begin : begin + _BATCH]
            encodings = self.tokens.encode(part, truncation, name="documents", first=begin)
            logits = self.call("forward", self.tokens.arrays(encodings))
            if logits.shape[1] != 1:
                raise self.settings.damaged(f"labels: expected one, got {logits.shape[1]}")
            rows.append(logits[:, 0])
        return np.concatenate(rows)


def _read(given: Any) -> tuple[str, list[str]]:
    if isinstance(given, dict) and given.keys() == {"query", "documents"} and isinstance(given["query"], str):
        documents = given["documents"]
        if isinstance(documents, list | tuple) and all(isinstance(one, str) for one in documents):
            return given["query"], list(documents)
    raise ArgumentTypeError(
        'pipeline: inputs: expected {"query": a string, "documents": a list of strings}, or a list of them, got '
        f"{type(given).__name__} {given!r:.80}"
    )
