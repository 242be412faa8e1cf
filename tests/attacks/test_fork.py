"""fork() beside loads and calls: the child works, or says at once what it cannot do."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

PRELUDE = """
import multiprocessing, os, signal, sys, threading, time
import numpy
import untorch
path = sys.argv[1]
x = numpy.linspace(-2, 2, 12, dtype=numpy.float32).reshape(3, 4)

@untorch.register_kernel("attack::clip_scale")
def clip_scale(x, factor):
    return numpy.clip(x, -1, 1) * numpy.float32(factor)

def in_child(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a hang is a failure
        try:
            os._exit(body() or 0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(code: str, package: pathlib.Path) -> list[str]:
    """Lines that the script prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code, str(package)],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.splitlines()


@pytest.mark.unsanitized
def test_beside_calls_and_loads(kernel_package: pathlib.Path) -> None:
    code = """
program = untorch.load(path, num_threads=1)
want = program.clip(x)
stop = False

def call():
    while not stop:
        program.clip(x)
        program.counted(x[0])

def load():
    while not stop:
        with untorch.load(path, num_threads=1) as other:
            other.session().counted(x[0])

def child():
    assert (program.clip(x) == want).all()
    torn = 0
    try:
        program.counted(x[0])
    except untorch.ModelError as error:
        assert str(error).endswith("call reset(), or make a session after the fork"), error
        program.reset()
        assert (program.counted(x[0]) == program.session().counted(x[0])).all()
        torn = 7
    with untorch.load(path, num_threads=1) as other:
        session = other.session()
        session.counted(x[0])
        session.fork().counted(x[0])
    return torn

threads = [threading.Thread(target=target) for target in (call, call, load)]
for thread in threads: thread.start()
codes = [in_child(child) for _ in range(25)]
stop = True
for thread in threads: thread.join()
print(set(codes) <= {0, 7})
"""
    assert run(code, kernel_package)[-1] == "True"


def test_in_a_kernel_while_others_wait(kernel_package: pathlib.Path) -> None:
    """The forking thread's own call goes on in the child; those of others are lost, with their runners."""
    code = """
program = untorch.load(path, num_threads=1)
session = program.session()
entered, leave = threading.Event(), threading.Event()
main = threading.get_ident()
codes = []

@untorch.register_kernel("attack::clip_scale")
def clip_scale(x, factor):
    if threading.get_ident() != main:
        entered.set()
        leave.wait()
    elif os.getpid() == parent and session.nbytes:
        pid = os.fork()
        if pid != 0: codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else: signal.alarm(20)
    return numpy.clip(x, -1, 1) * numpy.float32(factor)

parent = os.getpid()
threads = [threading.Thread(target=call) for call in (lambda: program.clip(x), lambda: session.counted(x[0]))]
for thread in threads: thread.start()
entered.wait()
time.sleep(0.1)
program.twice(x)  # each of its two kernels forks
if os.getpid() != parent:
    try:
        program.twice(x)
        program.clip(x)
        try:
            session.counted(x[0])
            os._exit(3)
        except untorch.ModelError as error:
            assert "the process was forked" in str(error), error
        session.reset()
        session.counted(x[0])
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(2)
    os._exit(0)
leave.set()
for thread in threads: thread.join()
print(codes)
"""
    assert run(code, kernel_package)[-1] == "[0, 0]"


def test_warm_parent_with_four_children(kernel_package: pathlib.Path) -> None:
    """As gunicorn does with preload_app: load and call in the parent, serve in children."""
    code = """
program = untorch.load(path, num_threads=1)
want = program.clip(x)
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        results = []
        threads = [threading.Thread(target=lambda: results.append((program.clip(x) == want).all())) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        os._exit(0 if results == [True] * 4 else 1)
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""
    assert run(code, kernel_package) == ["[0, 0, 0, 0]"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(kernel_package: pathlib.Path, tmp_path: pathlib.Path, method: str) -> None:
    """A program is an argument: with fork as it is, with spawn by its path."""
    script = tmp_path / "pool.py"
    script.write_text(
        """
import multiprocessing, sys
import numpy, untorch

@untorch.register_kernel("attack::clip_scale")
def clip_scale(x, factor):
    return numpy.clip(x, -1, 1) * numpy.float32(factor)

def work(arguments):
    program, x = arguments
    return program.clip(x), id(program)

if __name__ == "__main__":
    x = numpy.ones((3, 4), numpy.float32)
    program = untorch.load(sys.argv[1], num_threads=1)
    want = program.clip(x)
    with multiprocessing.get_context(sys.argv[2]).Pool(1) as pool:
        results = pool.map(work, [(program, x)] * 3)
    print(all((result == want).all() for result, _ in results), len({number for _, number in results}))
"""
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script), str(kernel_package), method],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 1\n", "")


def test_subprocess_and_the_first_load(kernel_package: pathlib.Path) -> None:
    """preexec_fn forks; the first load imports numpy on a thread of its own, which the child does not have."""
    code = """
import subprocess
def load_and_fork():
    program = untorch.load(path, num_threads=1)
    print(in_child(lambda: int(program.clip(x).shape != (3, 4))))
    print(subprocess.run(["true"], preexec_fn=lambda: program.clip(x)).returncode)
load_and_fork()
"""
    assert run(code, kernel_package) == ["0", "0"]
    code = """
import os, signal, sys
import untorch
program = untorch.load(sys.argv[1], num_threads=1)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    import numpy
    program["long"].open()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(kernel_package)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
