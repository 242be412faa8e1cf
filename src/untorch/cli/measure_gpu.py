"""Timing for ``untorch bench`` on a GPU: latency, enqueue, and copies. No typer in here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from untorch import _core
from untorch.cli.measure import Plan, Times, measure, summarise
from untorch.runtime.method import Method

__all__ = ["measure_gpu"]

_MAX_CALLS = 1000


def measure_gpu(method: Method, arrays: list[Any], plan: Plan, graph: bool) -> tuple[Times, dict[str, Any]]:
    """Latency of calls with arrays on the GPU, and statistics of enqueue, of copies, and of calls with numpy arrays."""
    index = int(method.device.partition(":")[2])
    on_cpu = [spec.device == "cpu" for spec in method.inputs] or [False] * len(arrays)
    placed = [array if stays else _core.to_device(array, index) for array, stays in zip(arrays, on_cpu, strict=True)]
    run: Callable[[list[Any]], list[Any]] = method.run
    captured = _core.Graph(method._core, placed) if graph else None
    if captured is not None:
        run = captured.run

    def wait() -> None:
        _core.synchronize(index, _core.call_stream(index))

    def whole() -> None:
        run(placed)
        wait()

    def copy_in() -> None:
        for array, stays in zip(arrays, on_cpu, strict=True):
            if not stays:
                _core.to_device(array, index)
        wait()

    wait()
    times = measure(whole, plan)
    few = Plan(min(plan.warmup, 10), min(len(times.latencies), _MAX_CALLS))
    outputs = [result for result in run(placed) if result is not None]
    wait()
    parts = {
        "enqueue": summarise(_timed(lambda: run(placed), wait, few)),
        "from_cpu": summarise(measure(lambda: run(arrays), few)),
        "to_gpu": summarise(measure(copy_in, few)),
        "to_cpu": summarise(measure(lambda: [output.numpy() for output in outputs], few)),
    }
    if captured is not None:
        captured.close()
    return times, parts


def _timed(call: Callable[[], object], between: Callable[[], object], plan: Plan) -> Times:
    """Like ``measure``; ``between`` runs after each call and is not timed."""
    latencies = []
    start = time.perf_counter()
    for number in range(plan.warmup + (plan.iterations or 1)):
        before = time.perf_counter()
        call()
        after = time.perf_counter()
        if number >= plan.warmup:
            latencies.append(after - before)
        between()
    return Times(latencies, time.perf_counter() - start)
