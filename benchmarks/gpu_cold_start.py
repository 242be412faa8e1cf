"""Process start to first result on the GPU: the MLP, numpy to numpy, the file in the page cache.

untorch imports numpy while the GPU starts, unless the program has imported it before: both are measured. torch takes so
long that it is started once, and again before that to fill the page cache with its libraries, unless --warm says that
they are in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from common import Report, Table, arguments
from gpu_common import BATCH, answer, child, describe_gpu, ensure, note_of

RUNS = {"untorch": 10, "numpy_first": 10, "torch": 1}
LABELS = {"untorch": "untorch", "numpy_first": "untorch, numpy imported first", "torch": "torch's loader"}
STAGES = ("import", "load", "first call")


def clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def start_after_numpy(path: str) -> list[float]:
    import numpy  # noqa: F401

    return start_untorch(path)


def start_untorch(path: str) -> list[float]:
    import untorch

    marks = [clock()]
    program = untorch.load(path)
    method = program[program.methods[0]]
    method.open()
    marks.append(clock())
    import numpy

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
        starts = {"untorch": start_untorch, "numpy_first": start_after_numpy, "torch": start_torch}
        answer(marks=starts[request["runtime"]](request["file"]))
        return
    warm = "--warm" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--warm"]
    options = arguments(__doc__)
    report = Report("gpu_cold_start", options.quick)
    describe_gpu(report)
    files = {runtime: str(ensure("mlp_stock" if runtime == "torch" else "mlp")) for runtime in RUNS}
    rows = []
    for runtime, runs in RUNS.items():
        request = {"runtime": runtime, "file": files[runtime]}
        if not options.quick and not (warm and runtime == "torch"):
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
    text = "Seconds from process start to first result, median (best); then medians of the stages."
    columns = ["Runtime", "First result", *STAGES, "Runs"]
    report.tables["gpu_cold_start"] = Table([c[0].upper() + c[1:] for c in columns], rows, note_of(report, text))
    report.write(options.output)


if __name__ == "__main__":
    main()
