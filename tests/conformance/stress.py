"""Calls a package very often in a process without torch: ``python stress.py JOB``; prints what it saw as JSON.

A job is a pickled {"package", "kind", "pairs"}: pairs of an input and its expected output. "threads" calls from 16
threads at once, "memory" measures the growth of the process over many calls.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import threading
from typing import Any

import numpy

THREADS, CALLS = 16, 2000
WARM_UP, REPEATED = 2000, 10_000


def same(result: Any, expected: Any) -> bool:
    return result.shape == expected.shape and bool(numpy.allclose(result, expected, rtol=1e-4, atol=1e-5))


def run_threads(package: str, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    import untorch

    wrong: list[str] = []
    right = [0] * THREADS
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        for call in range(CALLS):
            x, expected = pairs[(thread * 7 + call) % len(pairs)]
            try:
                result = program(x)
                if same(result, expected):
                    right[thread] += 1
                else:
                    wrong.append(f"thread {thread}, call {call}: other values")
            except Exception as error:
                wrong.append(f"thread {thread}, call {call}: {error}")

    with untorch.load(package, num_runners=4) as program:
        workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return {"right": sum(right), "wrong": wrong[:5]}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_memory(package: str, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    import untorch

    def call(count: int) -> None:
        for i in range(count):
            program(pairs[i % len(pairs)][0])
        gc.collect()

    with untorch.load(package) as program:
        call(WARM_UP)
        before = resident_bytes()
        call(REPEATED)
        growth = resident_bytes() - before
        x, expected = pairs[-1]
        return {"growth": growth, "calls": REPEATED, "right": same(program(x), expected)}


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    with open(sys.argv[1], "rb") as file:
        job = pickle.load(file)
    kinds = {"threads": run_threads, "memory": run_memory}
    print(json.dumps(kinds[job["kind"]](job["package"], job["pairs"])))


if __name__ == "__main__":
    main()
