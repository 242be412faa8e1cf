"""How much quantisation changes all-MiniLM-L6-v2's embeddings, computed by eager PyTorch on the CPU.

Cosine similarity to float32's, for the sentences of sentences.txt and, separately, for its inputs of a few words.
Errors are relative Frobenius norms of the weights. Sizes are of all linear layers, those in float32 included. Nothing
depends on the machine.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from common import ROOT

sys.path.insert(0, str(ROOT / "examples" / "sentence_embeddings"))

from build import load_model, model_directory, tokenize
from untorch.ops.w4a8 import W4A8_PART, quantize_parts
from untorch.quant import Int4Linear, NVFP4Linear, quantize

COLUMNS = ["Min. cosine", "Mean cosine", "Min., short inputs", "Weight error", "Size"]


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
            f"Cosine similarity to float32's embeddings, of {len(sentences)} sentences and of {len(short)} inputs of "
            f"a few words; mean relative error of the weights; size as a share of the linear layers' "
            f"{self._nbytes / 2**20:.1f} MiB."
        )

    def values(self, dtype: str, int8_activations: bool = False, **options: Any) -> dict[str, float]:
        """One value for each of COLUMNS, of a copy that is quantised so."""
        quantised = copy.deepcopy(self._model)
        found = quantize(quantised, dtype, progress=False, **options)
        if int8_activations:
            for layer in quantised.modules():
                if isinstance(layer, Int4Linear | NVFP4Linear):
                    layer.register_forward_pre_hook(_round_input)
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


def _round_input(layer: torch.nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    """The input as ``int8_activations`` multiplies it."""
    [x] = args
    values, scale = quantize_parts(x, -(-x.shape[-1] // W4A8_PART) * W4A8_PART)
    return (values * scale).flatten(-2)[..., : x.shape[-1]]
