"""What does NVFP4 cost in accuracy, what does the search for block scales gain, and how long does it take?

The errors are relative Frobenius norms for random weights, by rounding to nearest and by the search. The distributions
of real weights lie between these. minilm_quality.py says what is compared for a small real model. The time is for one
weight of 4096 × 4096, best of three.
"""

from __future__ import annotations

import time

import torch
from common import Report, Table, arguments
from minilm_quality import COLUMNS, Quality

from untorch.quant import quantize_nvfp4
from untorch.quant.nvfp4 import nvfp4_error

CASES: tuple[tuple[str, str | None], ...] = (("rtn", None), ("search", None), ("rtn", "*.value"), ("search", "*.value"))
METHODS = ("rtn", "search")


def main() -> None:
    options = arguments(__doc__)
    report = Report("nvfp4_quality", options.quick)
    size = 256 if options.quick else 4096
    errors(report, size)
    quality = Quality()
    rows = []
    for method, exclude in CASES[:1] if options.quick else CASES:
        values = quality.values("nvfp4", method=method, exclude=exclude)
        label = method + (f", {exclude} in float32" if exclude else "")
        report.values[label] = values
        rows.append([label, *(f"{value:.4f}" for value in values.values())])
    report.tables["nvfp4_quality"] = Table(["Method", *COLUMNS], rows, quality.note)
    weight = torch.randn(size, size)
    rows = []
    for method in METHODS:
        seconds = [best_of_three(weight.to(dtype), method) for dtype in (torch.float32, torch.bfloat16)]
        report.values[f"{method}, {size} × {size}"] = seconds
        rows.append([method, *(f"{value:.2f}" for value in seconds)])
    note = f"Seconds for one weight of {size} × {size}; {torch.get_num_threads()} threads."
    report.tables["nvfp4_seconds"] = Table(["Method", "float32", "bfloat16"], rows, note)
    report.write(options.output)


def errors(report: Report, size: int) -> None:
    torch.manual_seed(0)
    shape = (size, size)
    weights = {
        "uniform": torch.rand(shape) - 0.5,
        "normal": torch.randn(shape),
        "Student's t, 4 degrees of freedom": torch.distributions.StudentT(4.0).sample(shape),
    }
    rows = []
    for name, weight in weights.items():
        found = [nvfp4_error(weight, quantize_nvfp4(weight, search=method == "search")) for method in METHODS]
        report.values[name] = found
        rows.append([name, *(f"{value:.4f}" for value in found)])
    note = f"Relative error of a weight of {size} × {size} with random values."
    report.tables["nvfp4_errors"] = Table(["Distribution", *METHODS], rows, note)


def best_of_three(weight: torch.Tensor, method: str) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        quantize_nvfp4(weight, search=method == "search")
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
