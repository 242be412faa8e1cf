"""How fast is int8 on this CPU? Beside float32, ONNX Runtime's dynamic qint8 and static QDQ, and OpenVINO with NNCF.

A sentence encoder with its real weights, and BERT base, ResNet-50, MobileNet-v3, ViT-B, Whisper's encoder and an MLP
with random ones; one and two threads. Dynamic: activations are quantised when a call is made, by untorch a row at a
time, by ONNX Runtime the whole tensor; of convolutions, untorch has none. Static: ranges from four batches of random
inputs, with SmoothQuant (0.5) in untorch's transformers, which also run with attention in bfloat16; NNCF, where it is
installed, quantises attention's GEMMs. UNTORCH_BENCH_MODELS names some of the models to build. Every contestant has its
own process. Only one computes at a time, and they alternate in short bursts, so that a slow minute of the machine hits
all. Results are compared with float32's in eager PyTorch: the largest difference stands beside the times. With
--cpu-time the CPU time of the process is measured, with one thread.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from typing import Any

from common import WORK, Contestant, Report, Table, Workers, arguments, ensure_models, summarise
from models import INT8, INT8_BATCHES, INT8_MODELS, int8_case

THREADS = tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0)))
# Absolute; outputs are of a magnitude of 1 to 4. It finds wrong results, not inaccurate ones.
TOLERANCE = 1.0
LABELS = {
    "float32": "untorch, float32",
    "int8": "untorch, int8 dynamic",
    "static": "untorch, int8 static",
    "bf16": "untorch, int8 static, bf16 attention",
    "onnxruntime": "ONNX Runtime, float32",
    "qint8": "ONNX Runtime, qint8",
    "qint8_channel": "ONNX Runtime, qint8 per channel",
    "qdq": "ONNX Runtime, static QDQ",
    "openvino": "OpenVINO, float32",
    "nncf": "OpenVINO, NNCF",
}
OWN, PEERS = ("int8", "static", "bf16"), ("qint8", "qint8_channel", "qdq", "nncf")


def contestants(model: str) -> list[Contestant]:
    """The runtimes with their files of one model; OpenVINO where it is installed."""
    case = int8_case(model)
    found = [
        Contestant("float32", LABELS["float32"], "untorch", f"{case}.pt2"),
        Contestant("int8", LABELS["int8"], "untorch", f"{case}_int8.pt2"),
        Contestant("static", LABELS["static"], "untorch", f"{case}_static.pt2"),
        Contestant("bf16", LABELS["bf16"], "untorch", f"{case}_bf16.pt2"),
        Contestant("onnxruntime", LABELS["onnxruntime"], "onnxruntime", f"{case}.onnx"),
        Contestant("qint8", LABELS["qint8"], "onnxruntime", f"{case}_tensor.onnx"),
        Contestant("qint8_channel", LABELS["qint8_channel"], "onnxruntime", f"{case}_channel.onnx"),
        Contestant("qdq", LABELS["qdq"], "onnxruntime", f"{case}_qdq.onnx"),
    ]
    if importlib.util.find_spec("openvino") is not None:
        found.append(Contestant("openvino", LABELS["openvino"], "openvino", f"{case}.onnx"))
        found.append(Contestant("nncf", LABELS["nncf"], "openvino", f"{case}_nncf.xml"))
    return [entry for entry in found if (WORK / entry.file).exists()]


def measure(report: Report, threads: int, rounds: int, seconds: float, cpu_time: bool) -> None:
    """All models at one number of threads."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    rows = []
    for model in json.loads(INT8.read_text())["models"]:
        case = int8_case(model)
        entries = contestants(model)
        with Workers(entries, threads) as workers:
            differences = workers.check([case], TOLERANCE)
            times = workers.rounds([case], rounds, seconds, cpu_time=cpu_time)
            values: dict[str, Any] = {"idle_share": workers.idle_share}
        results = {entry.key: summarise(times[entry.key][case]) for entry in entries}
        for key, result in results.items():
            values[key] = {**result, "difference": differences[key][case]}
        report.values[f"{model}_{threads}"] = values
        median = {key: result["median"] for key, result in results.items()}
        cells = [
            f"{median[key] * 1e3:.2f} ({differences[key][case]:.0e})" if key in median else "–" for key in LABELS
        ]  # fmt: skip
        best = min(median[key] for key in OWN if key in median)
        peers = [median[key] for key in PEERS if key in median]
        faster = median["float32"] / best, min(peers) / best if peers else math.nan
        rows.append([INT8_MODELS[model], *cells, *(f"{value:.2f}" for value in faster)])
    note = (
        f"Milliseconds {'of CPU time ' if cpu_time else ''}a call with {label}, median of alternating bursts (largest "
        f"difference from eager float32); lower is better. Last columns, beside the best int8 of untorch: higher is "
        f"better. Static ranges from {INT8_BATCHES} random batches."
    )
    columns = ["Model", *LABELS.values(), "float32 ÷ int8", "Best peer in int8 ÷ int8"]
    report.tables[f"cpu_int8_{threads}_thread{'s' if threads > 1 else ''}"] = Table(columns, rows, note)


def main() -> None:
    options = arguments(__doc__, cpu_time=True)
    rounds, seconds = (1, 0.1) if options.quick else (6, 0.4)
    ensure_models("int8")
    report = Report("cpu_int8", options.quick)
    for threads in THREADS[:1] if options.cpu_time else THREADS:
        measure(report, threads, rounds, seconds, options.cpu_time)
    report.write(options.output)


if __name__ == "__main__":
    main()
