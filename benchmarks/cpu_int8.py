"""How fast are int8 linear layers on this CPU? Beside float32, ONNX Runtime's dynamic qint8, and OpenVINO.

An MLP, a sentence encoder with its real weights, and BERT base with random ones; one and two threads. Activations are
quantised when a call is made (dynamic), by untorch a row at a time, by ONNX Runtime the whole tensor.
UNTORCH_BENCH_MODELS names some of the models to build: mlp, minilm, bert_base. Every contestant has its own process.
Only one computes at a time, and they alternate in short bursts, so that a slow minute of the machine hits all. Results
are compared with float32's in eager PyTorch: the largest difference stands beside the times.
"""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

from common import Contestant, Report, Table, Workers, arguments, ensure_models, summarise
from models import INT8, INT8_MODELS, int8_case

THREADS = tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0)))
# Absolute; outputs are of a magnitude of 1 to 4. It finds wrong results, not inaccurate ones.
TOLERANCE = 1.0
LABELS = {
    "float32": "untorch, float32",
    "int8": "untorch, int8",
    "onnxruntime": "ONNX Runtime, float32",
    "qint8": "ONNX Runtime, qint8",
    "qint8_channel": "ONNX Runtime, qint8 per channel",
    "openvino": "OpenVINO, float32",
}
PEERS = ("qint8", "qint8_channel")


def contestants(model: str) -> list[Contestant]:
    """The runtimes with their files of one model; OpenVINO where it is installed."""
    case = int8_case(model)
    found = [
        Contestant("float32", LABELS["float32"], "untorch", f"{case}.pt2"),
        Contestant("int8", LABELS["int8"], "untorch", f"{case}_int8.pt2"),
        Contestant("onnxruntime", LABELS["onnxruntime"], "onnxruntime", f"{case}.onnx"),
        Contestant("qint8", LABELS["qint8"], "onnxruntime", f"{case}_tensor.onnx"),
        Contestant("qint8_channel", LABELS["qint8_channel"], "onnxruntime", f"{case}_channel.onnx"),
    ]
    if importlib.util.find_spec("openvino") is not None:
        found.append(Contestant("openvino", LABELS["openvino"], "openvino", f"{case}.onnx"))
    return found


def measure(report: Report, threads: int, rounds: int, seconds: float) -> None:
    """All models at one number of threads."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    rows = []
    for model in json.loads(INT8.read_text()):
        case = int8_case(model)
        entries = contestants(model)
        with Workers(entries, threads) as workers:
            differences = workers.check([case], TOLERANCE)
            times = workers.rounds([case], rounds, seconds)
            values: dict[str, Any] = {"idle_share": workers.idle_share}
        results = {entry.key: summarise(times[entry.key][case]) for entry in entries}
        for key, result in results.items():
            values[key] = {**result, "difference": differences[key][case]}
        report.values[f"{model}_{threads}"] = values
        median = {key: result["median"] for key, result in results.items()}
        cells = [
            f"{median[key] * 1e3:.2f} ({differences[key][case]:.0e})" if key in median else "–" for key in LABELS
        ]  # fmt: skip
        faster = median["float32"] / median["int8"], min(median[key] for key in PEERS) / median["int8"]
        rows.append([INT8_MODELS[model], *cells, *(f"{value:.2f}" for value in faster)])
    note = (
        f"Milliseconds a call with {label}, median (largest difference from eager float32); lower is better. Last "
        "columns: higher is better."
    )
    columns = ["Model", *LABELS.values(), "float32 ÷ int8", "Best qint8 ÷ int8"]
    report.tables[f"cpu_int8_{threads}_thread{'s' if threads > 1 else ''}"] = Table(columns, rows, note)


def main() -> None:
    options = arguments(__doc__)
    rounds, seconds = (1, 0.1) if options.quick else (6, 0.4)
    ensure_models("int8")
    report = Report("cpu_int8", options.quick)
    for threads in THREADS:
        measure(report, threads, rounds, seconds)
    report.write(options.output)


if __name__ == "__main__":
    main()
