"""How fast are convolutional networks on this CPU? Against ONNX Runtime and OpenVINO.

One image in float32 with one and two threads, and with as many threads as cores beside a busy process. Every contestant
has its own process. Only one computes at a time, and they alternate in short bursts, so that a slow minute of the
machine hits all.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from typing import Any

from common import Contestant, Report, Table, Workers, arguments, busy_neighbour, ensure_models, summarise
from models import VISION, vision_case

THREADS = tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0)))
TOLERANCE = 1e-3  # of the largest output


def contestants(model: str) -> tuple[Contestant, ...]:
    """The runtimes with their files of one model."""
    case = vision_case(model)
    return (
        Contestant("untorch", "untorch", "untorch", f"{case}.pt2"),
        Contestant("onnxruntime", "ONNX Runtime", "onnxruntime", f"{case}.onnx"),
        Contestant("openvino", "OpenVINO", "openvino", f"{case}.onnx"),
    )


def measure(report: Report, threads: int, rounds: int, seconds: float, busy: bool) -> None:
    """All networks at one number of threads; busy: beside a process that computes all the time."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    name = f"{threads}_thread{'s' if threads > 1 else ''}{'_busy' if busy else ''}"
    rows, ratios = [], []
    for model in VISION:
        case = vision_case(model)
        entrants = contestants(model)
        with Workers(entrants, threads) as workers:
            differences = workers.check([case], TOLERANCE)
            with busy_neighbour() if busy else contextlib.nullcontext():
                times = workers.rounds([case], rounds, seconds)
            values: dict[str, Any] = {"idle_share": workers.idle_share}
        results = {entrant.key: summarise(times[entrant.key][case]) for entrant in entrants}
        for key, result in results.items():
            values[key] = {**result, "difference": differences[key][case]}
        ours = results["untorch"]["median"]
        ratio = min(result["median"] for key, result in results.items() if key != "untorch") / ours
        ratios.append(ratio)
        report.values[f"{model}_{name}"] = values
        cells = [f"{result['median'] * 1e3:.2f} ({result['best'] * 1e3:.2f})" for result in results.values()]
        rows.append([model, *cells, f"{ratio:.2f}"])
    rows.append(["geometric mean", *[""] * len(contestants("")), f"{statistics.geometric_mean(ratios):.2f}"])
    columns = ["Model", *[entrant.label for entrant in contestants("")], "Best of the others ÷ untorch"]
    beside = ", beside a process that computes all the time" if busy else ""
    note = f"Milliseconds an image with {label}{beside}, median (best); lower is better. Last column: higher is better."
    report.tables[f"cpu_models_{name}"] = Table(columns, rows, note)


def main() -> None:
    options = arguments(__doc__)
    rounds, seconds = (1, 0.05) if options.quick else (6, 0.5)
    ensure_models("vision")
    report = Report("cpu_models", options.quick)
    for threads in THREADS:
        measure(report, threads, rounds, seconds, busy=False)
    measure(report, THREADS[-1], rounds, seconds, busy=True)
    report.write(options.output)


if __name__ == "__main__":
    main()
