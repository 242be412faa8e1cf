"""What does int4 cost a small real model in quality, what does it save, and how long does it take to quantise?

Cosine similarity of all-MiniLM-L6-v2's embeddings to float32's, for the sentences of sentences.txt and, apart, for its
inputs of a word or a few. Computed by eager PyTorch with the operator's reference, on the CPU. Errors are relative
Frobenius norms of the weights; bytes are those of all linear layers, what stays in float32 included. Quality does not
depend on the machine; the time does, which is that of one weight of 4096 × 4096, the best of three.
"""

from __future__ import annotations

import copy
import sys
import time

import torch
from common import ROOT, Report, Table, arguments

sys.path.insert(0, str(ROOT / "examples" / "sentence_embeddings"))

from build import load_model, model_directory, tokenize
from untorch.quant import quantize
from untorch.quant.methods import quantize_weight

CASES: tuple[tuple[int, str | None], ...] = ((256, None), (128, None), (64, None), (32, None), (32, "*.value"))


def main() -> None:
    options = arguments(__doc__)
    report = Report("int4_quality", options.quick)
    text = (ROOT / "benchmarks" / "sentences.txt").read_text()
    sentences, short = (part.splitlines() for part in text.strip().split("\n\n"))
    model = load_model()
    ids, mask = map(torch.from_numpy, tokenize(sentences + short, model_directory() / "tokenizer.json"))
    whole = sum(part.weight.numel() * 4 for part in model.modules() if isinstance(part, torch.nn.Linear))
    rows = []
    with torch.no_grad():
        expected = model(ids, mask)
        for group_size, exclude in CASES[-1:] if options.quick else CASES:
            for method in ("rtn", "hqq"):
                quantised = copy.deepcopy(model)
                found = quantize(quantised, group_size=group_size, method=method, exclude=exclude, progress=False)
                similarity = (quantised(ids, mask) * expected).sum(1)
                of, of_short = similarity[: len(sentences)], similarity[len(sentences) :]
                values = {
                    "least": float(of.min()),
                    "mean": float(of.mean()),
                    "least_short": float(of_short.min()),
                    "error": sum(layer.error for layer in found.layers) / len(found.layers),
                    "share": (found.nbytes_after + whole - found.nbytes_before) / whole,
                }
                label = f"{method}, {group_size}" + (f", {exclude} in float32" if exclude else "")
                report.values[label] = values
                rows.append([label, *(f"{value:.4f}" for value in values.values())])
    columns = ["Method, group size", "Least", "Mean", "Least, a few words", "Error of weights", "Bytes"]
    note = (
        f"Cosine similarity to float32's embeddings: {len(sentences)} sentences, {len(short)} inputs of a few words; "
        f"mean relative error of the weights; the share of the linear layers' {whole / 2**20:.1f} MiB."
    )
    report.tables["int4_quality"] = Table(columns, rows, note)
    size = 256 if options.quick else 4096
    weight = torch.randn(size, size)
    rows = []
    for method in ("rtn", "hqq"):
        seconds = [best_of_three(weight.to(dtype), method) for dtype in (torch.float32, torch.bfloat16)]
        report.values[f"{method}, {size} × {size}"] = seconds
        rows.append([method, *(f"{value:.2f}" for value in seconds)])
    note = f"Seconds for one weight of {size} × {size}, group 128, without packing; {torch.get_num_threads()} threads."
    report.tables["int4_seconds"] = Table(["Method", "float32", "bfloat16"], rows, note)
    report.write(options.output)


def best_of_three(weight: torch.Tensor, method: str) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        quantize_weight(weight, 128, method)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
