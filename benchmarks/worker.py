"""A contestant's process: opens its model, then answers requests on stdin, one JSON document a line, to its end."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy
from runtimes import OPEN, Call, Prepare


def load_case(case: str) -> tuple[list[Any], Any]:
    """A case's inputs and eager's output, from the file that models.py wrote."""
    with numpy.load(pathlib.Path(case)) as file:
        names = sorted(name for name in file.files if name.startswith("input"))
        return [file[name] for name in names], file["expected"]


def measure(call: Call, seconds: float, inner: int, cpu_time: bool = False) -> list[float]:
    """Seconds of each call; with ``cpu_time`` those that the process computed, all of its threads."""
    wall, clock = time.perf_counter, time.process_time if cpu_time else time.perf_counter
    repeats = range(inner)
    for _ in repeats:  # caches and threads have been idle
        call()
    times = []
    end = wall() + seconds
    while True:
        start = clock()
        for _ in repeats:
            call()
        times.append((clock() - start) / inner)
        if wall() >= end:
            return times


def answer(request: dict[str, Any], prepare: Prepare, cases: dict[str, tuple[Call, Any]]) -> dict[str, Any]:
    case = request["case"]
    if case not in cases:
        arrays, expected = load_case(case)
        cases[case] = prepare(arrays), expected
    call, expected = cases[case]
    if request["do"] == "time":
        return {"times": measure(call, request["seconds"], request["inner"], request["cpu_time"])}
    result = call()
    if result.shape != expected.shape or result.dtype != expected.dtype:
        raise SystemExit(f"{case}: got {result.dtype}{result.shape}, expected {expected.dtype}{expected.shape}")
    return {"difference": float(numpy.abs(result - expected).max())}


def main() -> None:
    # Libraries print to stdout: what they say goes to stderr, the answers keep the pipe.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    start = time.perf_counter()
    prepare = OPEN[options["runtime"]](options["file"], options["threads"], **options["options"])
    cases: dict[str, tuple[Call, Any]] = {}
    reply: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    while True:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
        line = sys.stdin.readline()
        if not line:
            return
        reply = answer(json.loads(line), prepare, cases)


if __name__ == "__main__":
    main()
