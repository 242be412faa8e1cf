"""Loads, calls and closes a package again and again: mappings, memory and time by cycle, which must not grow.

``python benchmarks/load_cycles.py model.pt2 --cycles 20000`` prints a line of JSON for each tenth of the cycles. Inputs
are made from the manifest, or given as ``--input 'int64:0,1,2,3'``, which stock packages need.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import untorch


def mappings() -> int:
    """How many the process has."""
    return len(pathlib.Path("/proc/self/maps").read_text().splitlines())


def resident() -> int:
    """Bytes of memory in use."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def example(path: str) -> list[np.ndarray]:
    """Ones for each input of the only method; dimensions that vary are 2."""
    with untorch.load(path) as program:
        specs = program[program.methods[0]].inputs
    return [np.ones([d if isinstance(d, int) else 2 for d in spec.shape], spec.dtype) for spec in specs]


def parse(text: str) -> np.ndarray:
    """``dtype:value,value``."""
    dtype, _, values = text.partition(":")
    return np.array(values.split(","), dtype)


def make_cycle(path: str, inputs: list[np.ndarray], bad: list[np.ndarray], sessions: int) -> Callable[[], None]:
    """One cycle: a call of the program and of each session, and one that fails if there is a bad input."""

    def cycle() -> None:
        with untorch.load(path) as program:
            name = program.methods[0]
            opened = [program.session() for _ in range(sessions)]
            for owner in (program, *opened):
                owner[name].run(inputs)
                if bad:
                    with contextlib.suppress(untorch.UntorchError):
                        owner[name].run(bad)

    return cycle


def main() -> None:
    """Runs the cycles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--threads", action="store_true", help="each cycle in a thread of its own, which ends")
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--input", action="append", default=[], help="dtype:value,value")
    parser.add_argument("--bad-input", action="append", default=[], help="of a call that fails in the model")
    options = parser.parse_args()
    inputs = [parse(text) for text in options.input] or example(options.path)
    bad = [parse(text) for text in options.bad_input]
    cycle = make_cycle(options.path, inputs, bad, options.sessions)
    if bad:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # generated code prints its errors
    step = max(options.cycles // 10, 1)
    start = time.perf_counter()
    for i in range(options.cycles + 1):
        if i % step == 0:
            now = time.perf_counter()
            line = {"cycles": i, "mappings": mappings(), "rss": resident(), "ms": round((now - start) * 1e3 / step, 3)}
            print(json.dumps(line), flush=True)
            start = time.perf_counter()
        if options.threads:
            thread = threading.Thread(target=cycle)
            thread.start()
            thread.join()
        else:
            cycle()


if __name__ == "__main__":
    sys.exit(main())
