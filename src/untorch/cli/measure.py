"""Timing for ``untorch bench``: calls from one or several threads, and their statistics. No typer in here."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Plan", "Times", "measure", "percentile", "summarise"]


@dataclass(frozen=True)
class Plan:
    """How long to measure: ``iterations`` calls of every thread, or, if that is None, ``seconds``."""

    warmup: int = 10
    iterations: int | None = None
    seconds: float = 2.0
    concurrency: int = 1


@dataclass
class Times:
    """Seconds of every call, and from the first one's start to the last one's end."""

    latencies: list[float] = field(default_factory=list)
    wall: float = 0.0


def measure(call: Callable[[], object], plan: Plan) -> Times:
    """Call ``call`` as planned, from ``plan.concurrency`` threads. Raises the first error of a thread."""
    if plan.concurrency == 1:
        for _ in range(plan.warmup):
            call()
        start = time.perf_counter()
        return Times(_loop(call, plan), time.perf_counter() - start)
    results: list[list[float]] = [[] for _ in range(plan.concurrency)]
    errors: list[Exception] = []
    gate = threading.Barrier(plan.concurrency + 1)

    def work(index: int) -> None:
        try:
            # Together, so that every runner that the load made is warm.
            for _ in range(plan.warmup):
                call()
            gate.wait()
            results[index] = _loop(call, plan)
        except threading.BrokenBarrierError:
            return
        except Exception as error:
            errors.append(error)
            gate.abort()

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(plan.concurrency)]
    for worker in workers:
        worker.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        gate.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    wall = time.perf_counter() - start
    if errors:
        raise errors[0]
    return Times([latency for part in results for latency in part], wall)


def _loop(call: Callable[[], object], plan: Plan) -> list[float]:
    clock = time.perf_counter
    latencies: list[float] = []
    append = latencies.append
    now = clock()
    end = now + plan.seconds if plan.iterations is None else math.inf
    remaining = math.inf if plan.iterations is None else plan.iterations
    while remaining > 0 and (now < end or not latencies):
        before = clock()
        call()
        now = clock()
        append(now - before)
        remaining -= 1
    return latencies


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the ordered values lie, interpolated linearly between neighbours."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(times: Times) -> dict[str, float | int]:
    """Number of calls, latency statistics in seconds, and throughput in calls a second."""
    ordered = sorted(times.latencies)
    return {
        "calls": len(ordered),
        "min_s": ordered[0],
        "mean_s": sum(ordered) / len(ordered),
        "p50_s": percentile(ordered, 0.50),
        "p90_s": percentile(ordered, 0.90),
        "p99_s": percentile(ordered, 0.99),
        "max_s": ordered[-1],
        "throughput_per_s": len(ordered) / times.wall,
    }
