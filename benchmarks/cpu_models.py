"""How fast are whole models on this CPU? Beside ONNX Runtime, OpenVINO and AOTInductor's frozen packages.

Batch 1, one and two threads, float32 and bfloat16, and as many threads as cores beside a busy process. Every contestant
has its own process. Only one computes at a time, and they alternate in short bursts, so that a slow minute of the
machine hits all. UNTORCH_BENCH_MODELS names some of the models of cpu_zoo.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from typing import Any

from common import WORK, Contestant, Report, Table, Workers, arguments, busy_neighbour, ensure_models, summarise
from models import ZOO, zoo_case

THREADS = tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0)))
# Of the largest output.
TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2}
LABELS = {
    "untorch": "untorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "frozen": "AOTInductor, frozen",
    "bfloat16": "untorch, bfloat16",
}
PEERS = ("onnxruntime", "openvino", "frozen")
# Those of the README: an image network, a text encoder, a language model.
FIRST = {
    "resnet50": "ResNet-50, 224×224",
    "bert_base": "BERT base, 128 tokens",
    "llama_135m": "Llama, 135 million, 64 tokens",
}


def contestants(model: str) -> dict[str, list[Contestant]]:
    """The runtimes with their files of one model, by dtype; those without a file could not be exported."""
    full, half = zoo_case(model, "float32"), zoo_case(model, "bfloat16")
    found = {
        "float32": [
            Contestant("untorch", LABELS["untorch"], "untorch", f"{full}.pt2"),
            Contestant("onnxruntime", LABELS["onnxruntime"], "onnxruntime", f"{full}.onnx"),
            Contestant("openvino", LABELS["openvino"], "openvino", f"{full}.onnx"),
            Contestant("frozen", LABELS["frozen"], "torch", f"{full}_frozen.pt2"),
        ],
        "bfloat16": [Contestant("bfloat16", LABELS["bfloat16"], "untorch", f"{half}.pt2")],
    }
    return {dtype: [entry for entry in entries if (WORK / entry.file).exists()] for dtype, entries in found.items()}


def usable(entry: Contestant, case: str, dtype: str, threads: int) -> bool:
    """Whether it loads its file and gives what eager gives."""
    try:
        with Workers([entry], threads) as workers:
            workers.check([case], TOLERANCE[dtype])
    except SystemExit as error:
        print(f"{entry.label}, {case}: {error}", file=sys.stderr)
        return False
    return True


def measure(report: Report, names: list[str], threads: int, rounds: int, seconds: float, busy: bool) -> None:
    """All models at one number of threads; busy: beside a process that computes all the time."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    name = f"{threads}_thread{'s' if threads > 1 else ''}{'_busy' if busy else ''}"
    rows, ratios, halves = [], [], []
    for model in names:
        results: dict[str, dict[str, float]] = {}
        values: dict[str, Any] = {}
        for dtype, entries in contestants(model).items():
            case = zoo_case(model, dtype)
            if busy:
                entries = [entry for entry in entries if dtype == "float32"]
            entries = [entry for entry in entries if entry.key in report.values["usable"][model]]
            if not entries:
                continue
            with Workers(entries, threads) as workers:
                differences = workers.check([case], TOLERANCE[dtype])
                with busy_neighbour() if busy else contextlib.nullcontext():
                    times = workers.rounds([case], rounds, seconds)
                values[f"{dtype}_idle_share"] = workers.idle_share
            for entry in entries:
                results[entry.key] = summarise(times[entry.key][case])
                values[entry.key] = {**results[entry.key], "difference": differences[entry.key][case]}
        report.values[f"{model}_{name}"] = values
        median = {key: result["median"] for key, result in results.items()}
        peers = [median[key] for key in PEERS if key in median]
        cells = [f"{median[key] * 1e3:.2f}" if key in median else "–" for key in LABELS if not busy or "16" not in key]
        ratio = min(peers) / median["untorch"] if peers and "untorch" in median else None
        cells.append("–" if ratio is None else f"{ratio:.2f}")
        ratios += [] if ratio is None else [ratio]
        if not busy:
            half = median["untorch"] / median["bfloat16"] if {"untorch", "bfloat16"} <= median.keys() else None
            cells.append("–" if half is None else f"{half:.2f}")
            halves += [] if half is None else [half]
        rows.append([model, *cells])
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    columns = ["Model", *[text for key, text in LABELS.items() if not busy or "16" not in key], "Best peer ÷ untorch"]
    means = [f"{statistics.geometric_mean(ratios):.2f}"] if ratios else ["–"]
    if not busy:
        columns.append("float32 ÷ bfloat16")
        means.append(f"{statistics.geometric_mean(halves):.2f}" if halves else "–")
    rows.append(["geometric mean", *[""] * (len(columns) - 1 - len(means)), *means])
    beside = ", beside a process that computes all the time" if busy else ""
    note = (
        f"Milliseconds a call with {label}{beside}, median; lower is better. Last columns: higher is better. –: it "
        "could not be exported, or gives another result than eager."
    )
    report.tables[f"cpu_models_{name}"] = Table(columns, rows, note)


def first_table(values: dict[str, Any], names: list[str]) -> Table:
    """Three models, one thread and as many as cores: milliseconds of each runtime."""
    rows = []
    for model in (name for name in FIRST if name in names):
        for threads in THREADS:
            label = f"{threads} thread{'s' if threads > 1 else ''}"
            found = values[f"{model}_{threads}_thread{'s' if threads > 1 else ''}"]
            cells = [f"{found[key]['median'] * 1e3:.1f}" if key in found else "–" for key in LABELS]
            rows.append([f"{FIRST[model]}, {label}", *cells])
    note = "Milliseconds a call, median, batch 1, float32 unless it says otherwise; lower is better."
    return Table(["Model", *LABELS.values()], rows, note)


def main() -> None:
    options = arguments(__doc__)
    rounds, seconds = (1, 0.05) if options.quick else (4, 0.4)
    ensure_models("zoo")
    built = json.loads(ZOO.read_text())
    names = built["models"]
    report = Report("cpu_models", options.quick)
    report.values["refused"] = built["refused"]
    report.values["usable"] = {
        model: [
            entry.key
            for dtype, entries in contestants(model).items()
            for entry in entries
            if usable(entry, zoo_case(model, dtype), dtype, THREADS[-1])
        ]
        for model in names
    }
    for threads in THREADS:
        measure(report, names, threads, rounds, seconds, busy=False)
    measure(report, names, THREADS[-1], rounds, seconds, busy=True)
    report.tables["cpu_models_first"] = first_table(report.values, names)
    report.write(options.output)


if __name__ == "__main__":
    main()
