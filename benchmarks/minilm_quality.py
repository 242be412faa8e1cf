"""What a way of quantising changes in all-MiniLM-L6-v2's embeddings, computed by eager PyTorch on the CPU.

Cosine similarity to float32's, for the sentences of sentences.txt and, apart, for its inputs of a word or a few. Errors
are relative Frobenius norms of the weights; bytes are those of all linear layers, what stays in float32 included. None
of it depends on the machine.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from common import ROOT

sys.path.insert(0, str(ROOT / "examples" / "sentence_embeddings"))

from build import load_model, model_directory, tokenize
from untorch.quant import quantize

COLUMNS = ["Least", "Mean", "Least, a few words", "Error of weights", "Bytes"]


class Quality:
    """The model with its float32 embeddings."""

    def __init__(self) -> None:
        text = (ROOT / "benchmarks" / "sentences.txt").read_text()
        sentences, short = (part.splitlines() for part in text.strip().split("\n\n"))
        self._model, self._count = load_model(), len(sentences)
        tokens = tokenize(sentences + short, model_directory() / "tokenizer.json")
        self._ids, self._mask = map(torch.from_numpy, tokens)
        linears = (part for part in self._model.modules() if isinstance(part, torch.nn.Linear))
        self._nbytes = sum(linear.weight.numel() * 4 for linear in linears)
        with torch.no_grad():
            self._expected = self._model(self._ids, self._mask)
        self.note = (
            f"Cosine similarity to float32's embeddings: {len(sentences)} sentences, {len(short)} inputs of a few "
            f"words; mean relative error of the weights; the share of the linear layers' {self._nbytes / 2**20:.1f} "
            f"MiB."
        )

    def values(self, dtype: str, **options: Any) -> dict[str, float]:
        """One value for each of COLUMNS, of a copy that is quantised so."""
        quantised = copy.deepcopy(self._model)
        found = quantize(quantised, dtype, progress=False, **options)
        with torch.no_grad():
            similarity = (quantised(self._ids, self._mask) * self._expected).sum(1)
        of, of_short = similarity[: self._count], similarity[self._count :]
        return {
            "least": float(of.min()),
            "mean": float(of.mean()),
            "least_short": float(of_short.min()),
            "error": sum(layer.error for layer in found.layers) / len(found.layers),
            "share": (found.nbytes_after + self._nbytes - found.nbytes_before) / self._nbytes,
        }
