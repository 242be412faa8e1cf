"""Run in a process of its own, without torch: does an entry point return while a kernel spins on another stream?

Usage: no_wait.py PACKAGE ENTRY. Prints JSON: whether the kernel still ran, and the milliseconds. The package has the
methods `put` and `get` of test_no_wait.py. Whatever ENTRY is named for happens for the first time in the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import untorch
from tests.gpu.spin import Spin

WIDTH = 64
Entry = Callable[[], Any]
PACKAGE = sys.argv[1]
BUSY, MINE = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
KEPT: list[Any] = []  # nothing is freed within the block
X, ONE = cupy.ones(WIDTH, np.float32), cupy.ones((), np.float32)
ODD = cupy.ones(WIDTH + 1, np.float32)[1:]  # not aligned to 16 bytes: graphs copy it


def on(stream: Any, entry: Entry) -> Any:
    with untorch.stream(stream):
        result = entry()
    KEPT.append(result)
    return result


def called(owner: Any) -> Any:
    """Both methods were called on both streams: their kernels are loaded."""
    for stream in (BUSY, MINE):
        on(stream, lambda: owner.put(X))
        on(stream, lambda: owner.get(ONE))
    cupy.cuda.Device().synchronize()
    return owner


def program() -> Any:
    return on(None, lambda: untorch.load(PACKAGE))


def session() -> Any:
    return called(program().session())


def busy(owner: Any) -> None:
    """The owner's buffers wait for the kernel."""
    on(BUSY, lambda: owner.put(X))


def of(make: Callable[[], Any], entry: Callable[[Any], Any], first: Callable[[Any], Any] | None = None) -> Entry:
    """`entry` on what `make` gives before the kernel starts; `first` is enqueued behind the kernel."""
    made = make()

    def run() -> None:
        if first is not None:
            first(made)
        on(MINE, lambda: entry(made))

    return run


def output() -> Any:
    made = on(MINE, lambda: called(program()).get(ONE))[0]
    MINE.synchronize()
    return made


def replayed() -> Any:
    made = session()
    graph = on(MINE, lambda: made.put.graph(X))
    MINE.synchronize()
    return made, graph


ENTRIES: dict[str, Callable[[], Entry]] = {
    "load": lambda: of(lambda: None, lambda _: untorch.load(PACKAGE)),
    "first call": lambda: of(program, lambda p: p.get(ONE)),
    "call": lambda: of(lambda: called(program()), lambda p: p.put(X)),
    "call with a numpy array": lambda: of(lambda: called(program()), lambda p: p.put(np.ones(WIDTH, np.float32))),
    "first output copy": lambda: of(output, lambda out: out.numpy()),
    "session": lambda: of(lambda: called(program()), lambda p: p.session()),
    "first call of a session": lambda: of(lambda: called(program()).session(), lambda s: s.put(X)),
    "fork": lambda: of(session, lambda s: s.fork()),
    "fork of a busy session": lambda: of(session, lambda s: s.fork(), busy),
    "first call of a fork": lambda: of(lambda: session().fork(), lambda s: s.put(X)),
    "reset": lambda: of(session, lambda s: s.reset()),
    "reset of a busy session": lambda: of(session, lambda s: s.reset(), busy),
    "graph": lambda: of(session, lambda s: s.put.graph(X)),
    "graph of a busy session": lambda: of(session, lambda s: s.put.graph(X), busy),
    "first replay": lambda: of(replayed, lambda made: made[1](X)),
    "replay of a busy session": lambda: of(replayed, lambda made: made[1](X), lambda made: busy(made[0])),
    "replay with a copied input": lambda: of(replayed, lambda made: made[1](ODD)),
    "replay with a numpy array": lambda: of(replayed, lambda made: made[1](np.ones(WIDTH, np.float32))),
    "DLPack": lambda: of(output, lambda out: cupy.from_dlpack(out)),
    "close a session": lambda: of(session, lambda s: s.close()),
    "close a program": lambda: of(lambda: called(program()), lambda p: p.close()),
}


def main() -> None:
    with Spin(BUSY) as spin:  # loads the kernel
        spin.release()
    entry = ENTRIES[sys.argv[2]]()
    cupy.cuda.Device().synchronize()
    with MINE, Spin(BUSY) as spin:
        start = time.perf_counter()
        entry()
        seconds = time.perf_counter() - start
        running = spin.running
    print(json.dumps({"running": running, "ms": round(1000 * seconds, 2)}))


if __name__ == "__main__":
    main()
