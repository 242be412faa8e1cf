"""From the start of a process to the first result from the GPU: the MLP, numpy to numpy, the file in the page cache.

torch takes so long that it is started once, after a run that fills the page cache with its libraries.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from common import Report, Table, arguments
from gpu_common import BATCH, answer, child, describe_gpu, ensure, note_of

RUNS = {"untorch": 10, "torch": 1}
LABELS = {"untorch": "untorch", "torch": "torch's loader"}
STAGES = ("import", "load", "first call")


def clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def start_untorch(path: str) -> list[float]:
    import numpy

    import untorch

    marks = [clock()]
    program = untorch.load(path)
    method = program[program.methods[0]]
    marks.append(clock())
    result = method(numpy.ones((BATCH, 64), numpy.float32))
    marks.append(clock())
    assert numpy.isfinite(result).all()
    return marks


def start_torch(path: str) -> list[float]:
    import numpy
    import torch

    marks = [clock()]
    model = torch._inductor.aoti_load_package(path)
    marks.append(clock())
    with torch.no_grad():
        result = model(torch.from_numpy(numpy.ones((BATCH, 64), numpy.float32)).cuda()).cpu().numpy()
    marks.append(clock())
    assert numpy.isfinite(result).all()
    return marks


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        request = json.loads(sys.argv[2])
        start = {"untorch": start_untorch, "torch": start_torch}[request["runtime"]]
        answer(marks=start(request["file"]))
        return
    options = arguments(__doc__)
    report = Report("gpu_cold_start", options.quick)
    describe_gpu(report)
    files = {"untorch": str(ensure("mlp")), "torch": str(ensure("mlp_stock"))}
    rows = []
    for runtime, runs in RUNS.items():
        request = {"runtime": runtime, "file": files[runtime]}
        if not options.quick:
            child(__file__, request)
        found: list[dict[str, Any]] = [child(__file__, request) for _ in range(1 if options.quick else runs)]
        times = [[b - a for a, b in zip([f["started"], *f["marks"]], f["marks"], strict=False)] for f in found]
        totals = [sum(stages) for stages in times]
        report.values[runtime] = {
            "totals": totals,
            "stages": dict(zip(STAGES, map(list, zip(*times, strict=True)), strict=True)),
        }
        middle = [statistics.median(stage) for stage in zip(*times, strict=True)]
        total = f"{statistics.median(totals):.3f} ({min(totals):.3f})"
        rows.append([LABELS[runtime], total, *(f"{value:.3f}" for value in middle), str(len(totals))])
    text = "Seconds from the process's start to the first output, median (best); then medians of the stages."
    columns = ["Runtime", "First output", *STAGES, "Runs"]
    report.tables["gpu_cold_start"] = Table([c[0].upper() + c[1:] for c in columns], rows, note_of(report, text))
    report.write(options.output)


if __name__ == "__main__":
    main()
