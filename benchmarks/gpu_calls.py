"""What does a call of a tiny model cost on the GPU? Enqueue time and latency, beside torch's loader.

An MLP of 64 → 256 → 64 with ReLU on a batch of 8 in device memory. The output stays there. A launch alone costs the CPU
microseconds: the launches of an empty kernel, as many as a call has, are the lower bound.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, WORK, Report, Table, arguments
from gpu_common import BATCH, answer, child, describe_gpu, ensure, note_of

LABELS = {
    "c_floor": "empty kernels, as many launches, C",
    "c_call": "untorch, C",
    "c_graph": "untorch, C, CUDA graph",
    "python_call": "untorch, Python",
    "python_graph": "untorch, Python, CUDA graph",
    "python_cupy": "untorch, Python, CuPy in and out",
    "torch_loader": "torch's loader",
    "torch_run": "torch's loader, loader.run",
}


def measure(call: Callable[[], object], wait: Callable[[], object], calls: int) -> dict[str, float]:
    """Median and best enqueue time (until the call returns) and latency (until the GPU is done) of ``calls`` calls."""
    enqueue, total = [], []
    for number in range(calls + calls // 10 + 1):
        start = time.perf_counter()
        call()
        enqueued = time.perf_counter()
        wait()
        done = time.perf_counter()
        if number > calls // 10:
            enqueue.append(enqueued - start)
            total.append(done - start)
    return {
        "enqueue": statistics.median(enqueue), "total": statistics.median(total),
        "best_enqueue": min(enqueue), "best_total": min(total),
    }  # fmt: skip


def untorch_child(calls: int) -> dict[str, Any]:
    import numpy

    import untorch
    from untorch import _core

    with untorch.load(ensure("mlp")) as program:
        method = program.forward
        x = _core.to_device(numpy.zeros((BATCH, 64), numpy.float32), 0)
        stream = _core.call_stream(0)

        def wait() -> None:
            _core.synchronize(0, stream)

        results = {"python_call": measure(lambda: method(x), wait, calls)}
        with method.graph(x) as graph:
            results["python_graph"] = measure(lambda: graph(x), wait, calls)
        try:
            import cupy
        except ImportError:
            return results
        own = cupy.cuda.Stream(non_blocking=True)
        with own, untorch.stream(own):
            array = cupy.zeros((BATCH, 64), numpy.float32)
            results["python_cupy"] = measure(lambda: cupy.from_dlpack(method(array)), own.synchronize, calls)
    return results


def torch_child(calls: int) -> dict[str, Any]:
    import torch
    from torch._inductor.package.package import AOTICompiledModel

    # What aoti_load_package makes, without its search for compilers, which takes most of a minute.
    model = AOTICompiledModel(torch._C._aoti.AOTIModelPackageLoader(str(ensure("mlp_stock")), "model", False, 1, -1))
    x = torch.zeros(BATCH, 64, device="cuda")
    wait = torch.cuda.synchronize
    with torch.no_grad():
        results = {"torch_loader": measure(lambda: model(x), wait, calls)}
        if hasattr(model, "loader"):
            results["torch_run"] = measure(lambda: model.loader.run([x]), wait, calls)
    return results


def from_c(calls: int) -> dict[str, Any]:
    import untorch
    from untorch.cli.process import library_path

    library = library_path().resolve()
    own = Path(untorch.__path__[0]) / "include"
    include = own if own.is_dir() else ROOT / "native" / "include"
    program = WORK / "gpu_calls"
    command = [os.environ.get("CC", "cc"), "-O2", "-std=gnu11", f"-I{include}", str(ROOT / "benchmarks/gpu_calls.c")]
    subprocess.run([*command, "-o", str(program), str(library), f"-Wl,-rpath,{library.parent}", "-ldl"], check=True)
    done = subprocess.run(
        [str(program), str(ensure("mlp")), str(BATCH), "64", str(calls)], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout)
    launches = found.pop("launches")
    return {"launches": launches, **{f"c_{key}": value for key, value in found.items()}}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        request = json.loads(sys.argv[2])
        answer(results={"untorch": untorch_child, "torch": torch_child}[request["runtime"]](request["calls"]))
        return
    options = arguments(__doc__)
    calls = 200 if options.quick else 20000
    report = Report("gpu_calls", options.quick)
    describe_gpu(report)
    for name in ("mlp", "mlp_stock"):
        ensure(name)
    values = from_c(calls)
    for runtime in ("untorch", "torch"):
        values |= child(__file__, {"runtime": runtime, "calls": calls})["results"]
    report.values = {"calls": calls, **values}
    rows = [
        [label, *(f"{values[key][part] * 1e6:.2f} ({values[key][f'best_{part}'] * 1e6:.2f})" for part in _PARTS)]
        for key, label in LABELS.items()
        if key in values
    ]
    text = (
        f"Microseconds until the call returns and until the GPU is done, median (best) of {calls} calls; lower is "
        f"better. MLP 64-256-64, batch {BATCH}, on the GPU; {values['launches']} launches a call."
    )
    report.tables["gpu_calls"] = Table(["Call", "Enqueue", "Latency"], rows, note_of(report, text))
    report.write(options.output)


_PARTS = ("enqueue", "total")

if __name__ == "__main__":
    main()
