"""One cold start: opens a model, runs it once, and prints the clock and the process's memory at that moment."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Sequence

import numpy
from runtimes import OPEN


def memory() -> dict[str, int]:
    """Resident bytes: all, private (RssAnon) and mapped from files (RssFile)."""
    values = {}
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile"):
            values[name] = int(value.split()[0]) * 1024
    return values


def make_inputs(shapes: Sequence[tuple[str, Sequence[int]]]) -> list[numpy.ndarray]:
    """Arrays of ones; as token numbers and mask they are as good as any."""
    return [numpy.ones(shape, dtype) for dtype, shape in shapes]


def main() -> None:
    request = json.loads(sys.argv[1])
    options = json.loads(request["contestant"])
    arrays = make_inputs(request["inputs"])
    imported = time.clock_gettime(time.CLOCK_MONOTONIC)
    prepare = OPEN[options["runtime"]](options["file"], options["threads"], **options["options"])
    opened = time.clock_gettime(time.CLOCK_MONOTONIC)
    result = prepare(arrays)()
    done = time.clock_gettime(time.CLOCK_MONOTONIC)
    after = memory()
    if not numpy.isfinite(result).all():
        raise SystemExit("the first output is not finite")
    sys.stdout.write("\n" + json.dumps({"imported": imported, "opened": opened, "done": done, **after}) + "\n")


if __name__ == "__main__":
    main()
