"""The interpreter exits while threads call: status 0, and not a word."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading, time
import numpy
import untorch
path, kind = sys.argv[1:]
x = numpy.ones((3, 4), numpy.float32)

@untorch.register_kernel("attack::clip_scale")
def clip_scale(x, factor):
    total = sum(range(200))  # bytecode, in which the thread may be when the interpreter ends
    return numpy.clip(x, -1, 1) * numpy.float32(factor)

program = untorch.load(path)
session = program.session()
large = numpy.zeros((4096, 2048), numpy.float32)

def call():
    while True:
        if kind == "kernels":
            program.clip(x)
        elif kind == "sessions":
            session.counted(x[0])
        elif kind == "long":
            program.long(large)
        else:
            with untorch.load(path) as other:
                other.twice(x)

for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.1)
if kind == "sessions":
    sys.exit()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runs"), [("kernels", 12), ("sessions", 8), ("long", 4), ("loads", 6)])
def test_daemon_threads_call_while_the_interpreter_exits(kernel_package: pathlib.Path, kind: str, runs: int) -> None:
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(kernel_package), kind], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_that_is_alive_at_the_end_is_no_leak(kernel_package: pathlib.Path) -> None:
    """nanobind used to print what was left."""
    code = (
        "import sys, numpy, untorch\n"
        "program = untorch.load(sys.argv[1])\n"
        "method, session = program.clip, program.session()\n"
        "untorch.register_kernel('attack::clip_scale', lambda x, f: (program, numpy.clip(x, -1, 1))[1])\n"
        "sys.kept = [program, method, session, method(numpy.ones((3, 4), numpy.float32))]\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(kernel_package)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
