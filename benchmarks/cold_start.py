"""How long from process start to the first result, and what is the resident memory then?

Fresh processes with files in the page cache, contestants alternate. The clock starts before the process is
created and stops when the first result is a numpy array. Python and numpy are part of it, and have a row of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import ROOT, WORK, Contestant, Report, Table, arguments, ensure_models

MODELS: dict[str, tuple[str, Sequence[tuple[str, Sequence[int]]]]] = {
    "mlp": ("MLP 64-256-64", (("float32", (8, 64)),)),
    "minilm": ("MiniLM, 1 × 32 tokens", (("int64", (1, 32)), ("int64", (1, 32)))),
}


def contestants(model: str) -> list[tuple[Contestant, int, int]]:
    """A contestant, its runs, and its runs with --quick."""
    cache = str(WORK / "openvino_cache")
    openvino_file = "minilm.xml" if model == "minilm" else f"{model}.onnx"
    return [
        (Contestant("numpy", "Python and numpy alone", "numpy", f"{model}.pt2"), 15, 2),
        (Contestant("untorch", "untorch", "untorch", f"{model}.pt2"), 15, 2),
        (Contestant("onnxruntime", "ONNX Runtime", "onnxruntime", f"{model}.onnx"), 15, 2),
        (Contestant("openvino", "OpenVINO", "openvino", openvino_file), 15, 2),
        (Contestant("openvino_cache", "OpenVINO, model cache", "openvino", openvino_file, {"cache": cache}), 15, 2),
        (Contestant("torch", "torch's loader", "torch", f"{model}_frozen.pt2"), 3, 1),
    ]


def start_once(contestant: Contestant, inputs: Sequence[Any]) -> dict[str, float]:
    """Seconds of the stages and bytes of memory of one fresh process."""
    request = json.dumps({"contestant": contestant.request(None), "inputs": inputs})
    command = [sys.executable, str(ROOT / "benchmarks" / "cold_child.py"), request]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    begin = time.clock_gettime(time.CLOCK_MONOTONIC)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{contestant.label}: its process ended with exit code {done.returncode}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "total": answer["done"] - begin,
        "python_and_numpy": answer["imported"] - begin,
        "import_and_load": answer["opened"] - answer["imported"],
        "first_call": answer["done"] - answer["opened"],
        **{name: answer[name] for name in ("VmRSS", "RssAnon", "RssFile")},
    }


def main() -> None:
    options = arguments(__doc__)
    ensure_models(*MODELS)
    shutil.rmtree(WORK / "openvino_cache", ignore_errors=True)
    report = Report("cold_start", options.quick)
    for model, (title, inputs) in MODELS.items():
        entries = [(contestant, quick if options.quick else runs) for contestant, runs, quick in contestants(model)]
        for contestant, _ in entries:  # the page cache, byte code, caches of compiled models
            start_once(contestant, inputs)
        results: dict[str, list[dict[str, float]]] = {contestant.key: [] for contestant, _ in entries}
        for number in range(max(runs for _, runs in entries)):
            for contestant, runs in entries:
                if number < runs:
                    results[contestant.key].append(start_once(contestant, inputs))
        rows = []
        values: dict[str, Any] = {}
        for contestant, runs in entries:
            measured = results[contestant.key]
            median = {name: statistics.median(run[name] for run in measured) for name in measured[0]}
            best = min(run["total"] for run in measured)
            values[contestant.key] = {"median": median, "best_total": best, "runs": measured}
            memory = [f"{median[name] / 2**20:.0f}" for name in ("VmRSS", "RssAnon", "RssFile")]
            rows.append([contestant.label, f"{median['total']:.3f} ({best:.3f})", *memory, str(runs)])
        report.values[model] = values
        note = f"{title}. Seconds from process start to first result, median (best); then MiB of memory, medians."
        columns = ["Runtime", "First result", "Resident", "Private", "File-backed", "Runs"]
        report.tables[f"cold_start_{model}"] = Table(columns, rows, note)
    report.write(options.output)


if __name__ == "__main__":
    main()
