"""How fast do weights reach the GPU? A package with gigabytes of random weights, from load to the first result.

The file is in the page cache, and the process is fresh each time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from common import Report, Table, arguments
from gpu_common import answer, child, describe_gpu, ensure, note_of

RUNS = 5


def load(path: str) -> dict[str, float]:
    import numpy

    import untorch
    from untorch import _core

    _core.to_device(numpy.zeros(1, numpy.float32), 0).numpy()  # the driver and its context: not what is measured
    start = time.perf_counter()
    program = untorch.load(path)
    method = program[program.methods[0]]
    method.open()
    opened = time.perf_counter()
    result = method(numpy.arange(4))
    done = time.perf_counter()
    assert numpy.isfinite(result).all()
    return {"load": opened - start, "first": done - start, "weights": float(program.memory()["weights"])}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        answer(**load(json.loads(sys.argv[2])["file"]))
        return
    options = arguments(__doc__)
    gib = 1 if options.quick else 8
    report = Report("gpu_weights", options.quick)
    describe_gpu(report)
    path = str(ensure(f"weights_{gib}"))
    child(__file__, {"file": path})
    found = [child(__file__, {"file": path}) for _ in range(1 if options.quick else RUNS)]
    report.values = {"gib": gib, "runs": found}
    weights = found[0]["weights"]
    rows = []
    for key, label in (("load", "load and open"), ("first", "load to first result")):
        times = [run[key] for run in found]
        middle = statistics.median(times)
        rows.append([label, f"{middle:.3f} ({min(times):.3f})", f"{weights / middle / 1e9:.2f}"])
    text = (
        f"{weights / 2**30:.1f} GiB of random float32 weights; seconds, median (best) of {len(found)}; bytes of "
        "weights over them."
    )
    report.tables["gpu_weights"] = Table(["Stage", "Seconds", "GB/s"], rows, note_of(report, text))
    report.write(options.output)


if __name__ == "__main__":
    main()
