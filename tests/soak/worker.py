"""Threads that call, load, close and fork models for a while: ``python worker.py FOLDER --seconds T``; prints JSON.

The time is cut into rounds. In each, all threads work at once, on programs that they share and on programs of their own;
between rounds there are no threads and no programs, and what the process holds is measured. No PyTorch here.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import os
import pathlib
import pickle
import random
import sys
import threading
import time
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]

import numpy  # noqa: E402

import untorch  # noqa: E402
from untorch import _core  # noqa: E402

THREADS = 32
ROUNDS = 8
PURE = ("mlp", "conv", "embedding", "kernel")


def scaled(x: Any, factor: float) -> Any:
    """The operator of models.Kernel."""
    return x * numpy.float32(factor) + numpy.float32(1)


class Slot:
    """A program that all threads use, and that any of them may exchange for a new one."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.program = untorch.load(path, num_runners=4)

    def exchange(self) -> None:
        """Others may be in the middle of a call of the old one: that finishes, or raises ClosedError."""
        old, self.program = self.program, untorch.load(self.path, num_runners=4)
        old.close()


class Soak:
    """What the threads share."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.pairs: dict[str, list[tuple[Any, Any]]] = pickle.loads((folder / "pairs.pickle").read_bytes())
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()
        self.slots: dict[str, Slot] = {}

    def path(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.pt2"

    def fail(self, text: str) -> None:
        with self.lock:
            if len(self.wrong) < 20:
                self.wrong.append(text)

    def compare(self, name: str, call: Any, rng: random.Random) -> None:
        """One call with a known result."""
        x, expected = rng.choice(self.pairs[name])
        result = call(x)
        if result.shape != expected.shape or not numpy.allclose(result, expected, rtol=1e-4, atol=1e-4):
            self.fail(f"{name}: other values than eager's")

    def call_shared(self, rng: random.Random) -> None:
        name = rng.choice(PURE)
        for _ in range(rng.randrange(1, 10)):
            self.compare(name, self.slots[name].program, rng)

    def call_own(self, rng: random.Random) -> None:
        name = rng.choice(PURE)
        with untorch.load(self.path(name), num_threads=rng.choice((0, 1, 2))) as program:
            self.compare(name, program, rng)

    def exchange(self, rng: random.Random) -> None:
        self.slots[rng.choice(list(self.slots))].exchange()

    def sessions(self, rng: random.Random) -> None:
        """Sessions and their forks each have a total of their own."""
        start = numpy.arange(16, dtype=numpy.float32).reshape(4, 4)
        one = numpy.ones((4, 4), numpy.float32)
        live = [(self.slots["total"].program.session(), 0)]
        for _ in range(rng.randrange(2, 12)):
            index = rng.randrange(len(live))
            session, added = live[index]
            change = rng.randrange(4)
            if change == 0 and len(live) < 5:
                live.append((session.fork(), added))
            elif change == 1 and len(live) > 1:
                session.close()
                del live[index]
            elif change == 2 and rng.random() < 0.2:
                session.reset()
                live[index] = (session, 0)
            else:
                live[index] = (session, added + 1)
                if not numpy.array_equal(session(one), (start + added + 1) * 2):
                    self.fail(f"total: a session with {added + 1} calls has another total")
        for session, _ in live[1:]:
            session.close()  # the first is left to its end

    def wrong_calls(self, rng: random.Random) -> None:
        program = self.slots["mlp"].program
        for argument in (numpy.zeros((2, 31), numpy.float32), numpy.zeros((2, 32)), None, "x"):
            try:
                program(argument)
            except untorch.InvalidArgumentError:
                continue
            self.fail(f"mlp: takes {argument!r}")
        program = self.slots["embedding"].program
        for length in (3, 2000):
            rows = numpy.zeros(length, numpy.int64)
            rows[rng.randrange(length)] = rng.choice((100, -101, 1 << 40))
            try:
                program(rows)
            except untorch.ModelError:
                continue
            self.fail("embedding: takes an index that is out of range")

    def work(self, seed: int, end: float) -> None:
        """One thread's share."""
        rng = random.Random(seed)
        steps = [self.call_shared] * 6 + [self.sessions] * 3 + [self.call_own, self.wrong_calls]
        while time.monotonic() < end:
            step = self.exchange if rng.random() < 0.02 else rng.choice(steps)
            try:
                step(rng)
                outcome = step.__name__
            except untorch.ClosedError:  # of a program that another thread exchanged
                outcome = "closed"
            except Exception as error:
                self.fail(f"{step.__name__}: {type(error).__name__}: {error}")
                outcome = "failed"
            with self.lock:
                self.counts[outcome] += 1

    def round(self, number: int, seconds: float) -> None:
        """All threads, from the first load to the last close."""
        self.slots = {name: Slot(self.path(name)) for name in (*PURE, "total")}
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self.work, args=(number * THREADS + i, end)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for slot in self.slots.values():
            slot.program.close()
        self.slots = {}


def held() -> dict[str, int]:
    """What the process holds: bytes in memory, mappings, open files, live tensors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as file:
        mappings = len(file.readlines())
    return {
        "resident": resident,
        "mappings": mappings,
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": _core.live_tensors(),
    }


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    untorch.register_kernel("soak::scaled", scaled)
    soak = Soak(options.folder)
    rounds = []
    for number in range(ROUNDS):
        soak.round(number, options.seconds / ROUNDS)
        rounds.append(held())
        print(f"round {number + 1} of {ROUNDS}: {rounds[-1]}", file=sys.stderr, flush=True)
    print(json.dumps({"steps": soak.counts, "wrong": soak.wrong, "rounds": rounds}))


if __name__ == "__main__":
    main()
