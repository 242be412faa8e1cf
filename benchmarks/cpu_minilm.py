"""What is the latency of a sentence-embedding model on this CPU? Against torch's loader, ONNX Runtime and OpenVINO.

all-MiniLM-L6-v2 in float32, pooling included, numpy arrays to numpy array. Every contestant has its own process.
Only one computes at a time, and they alternate in short bursts, so that a slow minute of the machine hits all.
"""

from __future__ import annotations

import os
from typing import Any

from common import Contestant, Report, Table, Workers, arguments, ensure_models, summarise
from models import MINILM_CASES, minilm_case

CONTESTANTS = (
    Contestant("untorch", "untorch", "untorch", "minilm.pt2"),
    Contestant("torch", "torch's loader", "torch", "minilm_stock.pt2"),
    Contestant("torch_frozen", "torch's loader, frozen weights", "torch", "minilm_frozen.pt2"),
    Contestant("onnxruntime", "ONNX Runtime", "onnxruntime", "minilm.onnx"),
    Contestant("openvino_onnx", "OpenVINO, ONNX file", "openvino", "minilm.onnx"),
    Contestant("openvino", "OpenVINO, own conversion", "openvino", "minilm.xml"),
)
TOLERANCE = 1e-4
THREADS = tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0)))


def main() -> None:
    options = arguments(__doc__)
    rounds, seconds = (1, 0.02) if options.quick else (6, 0.4)
    ensure_models("minilm")
    report = Report("cpu_minilm", options.quick)
    cases = [minilm_case(batch, length) for batch, length in MINILM_CASES]
    headings = [f"{batch} × {length}" for batch, length in MINILM_CASES]
    summary: list[list[str]] = []
    for threads in THREADS:
        with Workers(CONTESTANTS, threads) as workers:
            differences = workers.check(cases, TOLERANCE)
            times = workers.rounds(cases, rounds, seconds)
            idle = workers.idle_share
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        rows = []
        values: dict[str, Any] = {"idle_share": idle}
        for contestant in CONTESTANTS:
            results = {case: summarise(times[contestant.key][case]) for case in cases}
            values[contestant.key] = {
                case: {**results[case], "difference": differences[contestant.key][case]} for case in cases
            }
            cells = [f"{results[case]['median'] * 1e3:.2f} ({results[case]['best'] * 1e3:.2f})" for case in cases]
            largest = max(differences[contestant.key].values())
            rows.append([contestant.label, *cells, f"{largest:.0e}"])
            summary.append([f"{contestant.label}, {label}", *cells])
        report.values[f"threads_{threads}"] = values
        note = f"Milliseconds a call with {label}, median (best), sentences × tokens; lower is better."
        columns = ["Runtime", *headings, "Largest difference from eager"]
        report.tables[f"cpu_minilm_{threads}_thread{'s' if threads > 1 else ''}"] = Table(columns, rows, note)
    note = "Milliseconds a call, median (best), sentences × tokens; lower is better."
    report.tables["cpu_minilm"] = Table(["Runtime", *headings], summary, note)
    report.write(options.output)


if __name__ == "__main__":
    main()
