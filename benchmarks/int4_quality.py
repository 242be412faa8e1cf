"""What does int4 cost a small real model in accuracy, what does it save, and how long does quantisation take?

minilm_quality.py says what is compared. The time is for one weight of 4096 × 4096, best of three.
"""

from __future__ import annotations

import time

import torch
from common import Report, Table, arguments
from minilm_quality import COLUMNS, Quality

from untorch.quant.methods import quantize_int4

CASES: tuple[tuple[int, str | None], ...] = ((256, None), (128, None), (64, None), (32, None), (32, "*.value"))


def main() -> None:
    options = arguments(__doc__)
    report = Report("int4_quality", options.quick)
    quality = Quality()
    rows = []
    for group_size, exclude in CASES[-1:] if options.quick else CASES:
        for method, int8_activations in (("rtn", False), ("symmetric", False), ("hqq", False), ("hqq", True)):
            values = quality.values("int4", int8_activations, group_size=group_size, method=method, exclude=exclude)
            label = f"{method}, {group_size}" + (f", {exclude} in float32" if exclude else "")
            label += ", int8 activations" if int8_activations else ""
            report.values[label] = values
            rows.append([label, *(f"{value:.4f}" for value in values.values())])
    report.tables["int4_quality"] = Table(["Method, group size", *COLUMNS], rows, quality.note)
    size = 256 if options.quick else 4096
    weight = torch.randn(size, size)
    rows = []
    for method in ("rtn", "symmetric", "hqq"):
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
        quantize_int4(weight, 128, method, *weight.shape)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
