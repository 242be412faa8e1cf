"""How much do static ranges, observers and SmoothQuant change all-MiniLM-L6-v2's embeddings in int8?

Cosine similarity to float32's embeddings, of the sentences of sentences.txt and, separately, of its inputs of a few
words, from the exported graph as the file computes it. Static ranges are calibrated with the first eight sentences,
one a batch; the others, and all short inputs, are unseen. Nothing depends on the machine.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import numpy
import torch
from common import ROOT, Report, Table, arguments
from torch.export import Dim

sys.path.insert(0, str(ROOT / "examples" / "sentence_embeddings"))

import untorch
from build import load_model, model_directory, tokenize
from untorch.export import export

CALIBRATED = 8
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dynamic", {}),
    ("static, minmax", {"observer": "minmax"}),
    ("static, percentile 99.99", {"observer": "percentile"}),
    ("static, mse", {"observer": "mse"}),
    ("static, minmax, smooth 0.5", {"observer": "minmax", "smooth": 0.5}),
    ("static, minmax, smooth 0.8", {"observer": "minmax", "smooth": 0.8}),
    ("static, percentile 99.99, smooth 0.5", {"observer": "percentile", "smooth": 0.5}),
)


def main() -> None:
    options = arguments(__doc__)
    report = Report("int8_quality", options.quick)
    text = (ROOT / "benchmarks" / "sentences.txt").read_text()
    sentences, short = (part.splitlines() for part in text.strip().split("\n\n"))
    model, tokenizer = load_model(), model_directory() / "tokenizer.json"
    ids, mask = tokenize(sentences + short, tokenizer)
    single = [tuple(map(torch.from_numpy, tokenize([line], tokenizer))) for line in sentences[:CALIBRATED]]
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    batch, length = Dim("batch", min=1, max=256), Dim("length", min=2, max=512)
    example = torch.randint(1000, 20000, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.pt2"
        for name, fields in CASES[:2] if options.quick else CASES:
            quantize = {"dtype": "int8", **({"calibration": single} if fields else {}), **fields}
            shapes = ({0: batch, 1: length}, {0: batch, 1: length})
            export(model, example, path, dynamic_shapes=shapes, quantize=quantize, progress=False)
            similarity = numpy.sum(untorch.load(path)(ids, mask) * expected, axis=1)
            of, of_short = similarity[: len(sentences)], similarity[len(sentences) :]
            values = [float(of.min()), float(of.mean()), float(of_short.min())]
            report.values[name] = dict(zip(("least", "mean", "least_short"), values, strict=True))
            rows.append([name, *(f"{value:.4f}" for value in values)])
    note = (
        f"Cosine similarity to float32's embeddings, of {len(sentences)} sentences and of {len(short)} inputs of a few "
        f"words; static ranges from {CALIBRATED} of the sentences."
    )
    report.tables["int8_quality"] = Table(
        ["Activations", "Min. cosine", "Mean cosine", "Min., short inputs"], rows, note
    )
    report.write(options.output)


if __name__ == "__main__":
    main()
