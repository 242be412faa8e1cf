"""Loading, calling and closing again and again leaves nothing behind: libraries are unmapped when they are closed."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import untorch
from tests.packages import ROOT, compiled

MODELS = pathlib.Path(__file__).with_name("models.py")
SCRIPT = ROOT / "benchmarks" / "load_cycles.py"
ROWS = np.arange(4)
CYCLES = 300


@pytest.fixture(params=["own", "stock"])
def real(request: pytest.FixtureRequest) -> pathlib.Path:
    """A package of a real model library, made by untorch and by PyTorch."""
    return compiled(MODELS, request.param)


_others: set[str] = set()


@pytest.fixture(autouse=True)
def open_before() -> None:
    """Libraries that other tests of the process keep open do not count."""
    _others.clear()
    _others.update(mappings())


def mappings() -> list[str]:
    """Lines about model libraries, with their addresses and inodes."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "untorch-model" in line]


def libraries() -> int:
    """Mappings of model libraries that the test opened."""
    return sum(line not in _others for line in mappings())


def call(program: untorch.Program | untorch.Session, rows: np.ndarray = ROWS) -> np.ndarray:
    """The result of the only method."""
    return program[program.methods[0]].run([rows])[0]


@pytest.mark.slow
@pytest.mark.unsanitized
@pytest.mark.parametrize("options", [[], ["--sessions", "2", "--bad-input", "int64:0,1,2,99"], ["--threads"]])
def test_cycles_leave_nothing_behind(options: list[str], real: pathlib.Path) -> None:
    command = [sys.executable, str(SCRIPT), str(real), "--cycles", str(CYCLES), "--input", "int64:0,1,2,3", *options]
    lines = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    assert lines[-1]["cycles"] == CYCLES
    settled, last = lines[3], lines[-1]
    assert last["mappings"] - settled["mappings"] <= 10
    assert last["rss"] - settled["rss"] <= 5 << 20


@pytest.mark.slow
def test_a_closed_program_is_freed_without_the_garbage_collector(real: pathlib.Path) -> None:
    gc.disable()
    try:
        with untorch.load(real) as program, program.session() as session:
            call(program)
            call(session)
        del program, session
        maps = pathlib.Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
    assert str(real) not in maps
    assert libraries() == 0


def run_in(*steps: Callable[[], object]) -> threading.Thread:
    """A thread that does the steps."""

    def work() -> None:
        for step in steps:
            step()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_thread_may_end_after_the_library_is_closed(real: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    called, closed = threading.Event(), threading.Event()
    errors = []

    def fail() -> None:  # leaves a long text in the library's thread_local error
        try:
            call(program, ROWS + 6)
        except untorch.ModelError as error:
            errors.append(str(error))

    program = untorch.load(real)
    thread = run_in(fail, called.set, closed.wait)
    assert called.wait(60)
    program.close()
    assert libraries() == 0
    closed.set()
    thread.join()
    assert "index out of bounds" in errors[0]
    capfd.readouterr()


def test_a_thread_may_end_before_the_library_is_closed(real: pathlib.Path) -> None:
    with untorch.load(real) as program:
        for _ in range(3):
            run_in(lambda: call(program)).join()
        assert libraries() != 0
    assert libraries() == 0


def test_threads_end_while_libraries_are_closed(real: pathlib.Path) -> None:
    for _ in range(20):
        program = untorch.load(real)
        _ = program[program.methods[0]]
        gate = threading.Barrier(5)
        threads = [run_in(partial(call, program), gate.wait) for _ in range(4)]
        gate.wait(60)
        program.close()
        for thread in threads:
            thread.join()
        assert libraries() == 0


def test_a_fork_between_call_and_close(real: pathlib.Path) -> None:
    closed = threading.Event()
    called = threading.Event()
    program = untorch.load(real)
    thread = run_in(lambda: call(program), called.set, closed.wait)
    assert called.wait(60)
    call(program)
    child = os.fork()
    if child == 0:  # the other thread's objects do not exist here
        program.close()
        os._exit(1 if libraries() else 0)
    assert os.waitpid(child, 0)[1] == 0
    program.close()
    closed.set()
    thread.join()
    assert libraries() == 0


def test_the_process_may_end_with_libraries_open(real: pathlib.Path) -> None:
    script = (
        "import sys, threading, time, numpy, untorch\n"
        "program = untorch.load(sys.argv[1]); method = program[program.methods[0]]; rows = numpy.arange(4)\n"
        "def work():\n    method.run([rows])\n    time.sleep(60)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "method.run([rows]); time.sleep(0.05)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(real)], timeout=60).returncode == 0
