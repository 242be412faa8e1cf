"""Ctrl-C in a long call, and while a call waits for another; on the main thread, in a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, time
import numpy
import untorch
signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may have it ignored
path, kind = sys.argv[1:]
x = numpy.ones((3, 4), numpy.float32)
large = numpy.zeros((4096, 2048), numpy.float32)
entered, leave = threading.Event(), threading.Event()

@untorch.register_kernel("attack::clip_scale")
def clip_scale(x, factor):
    entered.set()
    leave.wait()
    return x

program = untorch.load(path, num_threads=1)
session = program.session()
calls = {
    "operators": lambda: program.long(large),
    "runner": lambda: program.clip(x),
    "session": lambda: session.counted(x[0]),
}
method = calls[kind]
if kind != "operators":
    thread = threading.Thread(target=method)
    thread.start()
    entered.wait()
else:
    program.long(large)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    method()
    print("returned")
except KeyboardInterrupt as error:
    print(type(error).__name__, error.__cause__)
leave.set()
if kind != "operators":
    thread.join()
    method()
    print("and runs")
"""


@pytest.mark.parametrize("kind", ["operators", "runner", "session"])
def test_a_call_ends_with_keyboard_interrupt(kernel_package: pathlib.Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(kernel_package), kind], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr  # generated code prints that a function failed
    assert done.stdout.split("\n")[0] == "KeyboardInterrupt None"
    assert kind == "operators" or "and runs" in done.stdout


def test_a_signal_handler_that_raises_something_else(kernel_package: pathlib.Path) -> None:
    code = """
import signal, sys
import numpy, untorch
class Stop(Exception): pass
def handler(*_): raise Stop("enough")
signal.signal(signal.SIGALRM, handler)
program = untorch.load(sys.argv[1], num_threads=1)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    while True: program.long(numpy.zeros((4096, 2048), numpy.float32))
except Stop as error:
    print(repr(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(kernel_package)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "Stop('enough')\n"), done.stderr


@pytest.mark.slow
def test_handlers_run_between_operators(kernel_package: pathlib.Path) -> None:
    """Else the handler would run when the call has returned."""
    code = """
import signal, sys, time
import numpy, untorch
handled = []
signal.signal(signal.SIGALRM, lambda *_: handled.append(time.perf_counter()))
program = untorch.load(sys.argv[1], num_threads=1)
x = numpy.zeros((4096, 2048), numpy.float32)
begin = time.perf_counter()
program.long(x)
whole = time.perf_counter() - begin
signal.setitimer(signal.ITIMER_REAL, whole / 8)
program.long(x)
print(len(handled), time.perf_counter() - handled[0] > whole / 8)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(kernel_package)], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 True\n", "")
