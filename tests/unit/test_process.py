"""A program in other processes and in copies, the logger, and what the operating system refuses."""

from __future__ import annotations

import copy
import errno
import gc
import logging
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest

import untorch
from untorch.runtime import process
from untorch.runtime import program as program_module

X = np.ones((2, 4), np.float32)


@pytest.fixture
def own_copy(own_package: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that no other test has left open."""
    return pathlib.Path(shutil.copy(own_package, tmp_path / "own.pt2"))


def test_a_program_unpickles_as_itself_where_it_is_open(own_copy: pathlib.Path) -> None:
    program = untorch.load(own_copy)
    assert pickle.loads(pickle.dumps(program)) is program
    assert copy.copy(program) is program and copy.deepcopy([program])[0] is program
    other = untorch.load(own_copy, num_runners=2)
    assert pickle.loads(pickle.dumps(other)) is other
    text = pickle.dumps(program)
    program.close()
    again = pickle.loads(text)
    assert again is not program and again is not other
    assert pickle.loads(text) is again
    np.testing.assert_array_equal(again.linear(X), other.linear(X))
    with pytest.raises(untorch.ClosedError, match="^pickle: the program .* is closed$"):
        pickle.dumps(program)
    again.close()
    other.close()


@pytest.mark.slow
def test_some_unpickled_programs_stay_loaded(own_copy: pathlib.Path) -> None:
    """A pool's worker holds none between two tasks."""
    with untorch.load(own_copy, num_runners=3) as program:
        text = pickle.dumps(program)
    number = id(pickle.loads(text))
    gc.collect()
    assert id(pickle.loads(text)) == number
    shared = process.Shared(kept=2)
    for value in (made := [np.ones(1), np.ones(1), np.ones(1)]):
        shared.keep(value)
    assert [id(value) for value in shared._kept] == [id(made[2]), id(made[1])]
    pickle.loads(text).close()
    assert not any(kept.path == str(own_copy) for kept in program_module._open._kept)


def test_a_changed_file_is_loaded_anew(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(own_package.read_bytes())
    program = untorch.load(path)
    text = pickle.dumps(program)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(text)
    path.write_bytes(own_package.read_bytes())
    with pickle.loads(text) as other:
        assert other is not program
    program.close()


def test_the_path_is_absolute(own_package: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_package.parent)
    with untorch.load(own_package.name) as program:
        assert program.path == own_package.name
        text = pickle.dumps(program)
    monkeypatch.chdir("/")
    with pickle.loads(text) as again:
        np.testing.assert_array_equal(again.linear(X).shape, (2, 3))


def test_what_does_not_pickle_says_why(own_package: pathlib.Path) -> None:
    with untorch.load(own_package) as program:
        with pytest.raises(untorch.InvalidArgumentError, match="^a Session is neither pickled nor copied: its buffers"):
            pickle.dumps(program.session())
        with pytest.raises(untorch.InvalidArgumentError, match=r"fork\(\) for a copy of its state"):
            copy.deepcopy(program.session())
        with pytest.raises(
            untorch.InvalidArgumentError, match="^method 'linear': a Method is neither pickled nor copied"
        ):
            pickle.dumps(program.linear)


def test_the_logger_tells_of_loads(own_package: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "untorch"), untorch.load(own_package) as program:
        program.linear(X)
    (loaded, opened) = caplog.records
    assert loaded.levelno == logging.INFO and loaded.filename == "program.py"
    assert loaded.getMessage().startswith(f"loaded {own_package} (alias, counter, linear, types) in ")
    assert opened.levelno == logging.DEBUG
    assert opened.getMessage().startswith(f"opened linear of {own_package} in ")


def test_import_does_not_import_logging() -> None:
    code = "import sys, untorch; print('logging' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_locks_are_free_in_a_forked_child() -> None:
    lock = process.Lock()
    with lock:
        before = lock._lock
        process.Lock.renew_all()
        assert lock._lock is not before
        lock._lock.acquire()


def test_too_many_open_files(own_package: pathlib.Path) -> None:
    code = """
import errno, os, resource, sys
import numpy, untorch
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
def fill():
    try:
        while True: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
program = untorch.load(sys.argv[1])
fill()
for free in range(3):
    try:
        program.linear.open()
        print("opened")
    except untorch.SystemResourceError as error:
        print(error.errno == errno.EMFILE, str(error).endswith("Too many open files"))
    os.close(held.pop())
try:
    fill()
    untorch.load(sys.argv[1])
except untorch.FileOpenError as error:
    print(str(error).endswith("Too many open files"))
"""
    done = subprocess.run([sys.executable, "-c", code, str(own_package)], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "True True" and "opened" in lines and lines[-1] == "True", lines


def test_no_address_space_is_out_of_memory(own_package: pathlib.Path) -> None:
    code = """
import resource, sys
import numpy, untorch
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 16)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    program = untorch.load(sys.argv[1])
    for name in program: program[name].open()
except untorch.OutOfMemoryError as error:
    print("out of memory")
"""
    done = subprocess.run([sys.executable, "-c", code, str(own_package)], capture_output=True, text=True, check=False)
    assert done.stdout == "out of memory\n", done.stderr


@pytest.fixture
def linear(own_package: pathlib.Path) -> untorch.Method:
    program = untorch.load(own_package)
    return program.linear


def failing(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def array_like(**attributes: object) -> object:
    return type("Made", (), attributes)()


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"__dlpack_device__": failing(TypeError("no"))}, "__dlpack_device__ of Made raised TypeError: no"),
        (
            {"__dlpack_device__": lambda _: "no"},
            "__dlpack_device__ of Made raised TypeError: expected a pair of integers",
        ),
        ({"__dlpack_device__": lambda _: ("a", 1)}, "expected a pair of integers, got tuple"),
        ({"__dlpack_device__": lambda _: (1, 10**30)}, "expected a pair of integers, got tuple"),
        ({"__dlpack__": failing(TypeError("no"))}, "__dlpack__ of Made raised TypeError: no"),
        ({"__dlpack__": failing(RuntimeError("busy"))}, "__dlpack__ of Made raised RuntimeError: busy"),
        ({"__dlpack__": lambda _, **__: 3}, "__dlpack__ of Made gave no DLPack capsule"),
        ({"__dlpack__": 3}, "__dlpack__ of Made raised TypeError: 'int' object is not callable"),
    ],
)
def test_a_protocol_that_fails_names_the_argument(linear: untorch.Method, attributes: dict, text: str) -> None:
    made = array_like(**{"__dlpack__": lambda _, **__: None, "__dlpack_device__": lambda _: (1, 0), **attributes})
    with pytest.raises(untorch.ArgumentTypeError, match=r"^method 'linear', argument 0: ") as caught:
        linear(made)
    assert text in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_a_cuda_array_interface_that_is_none(linear: untorch.Method) -> None:
    with pytest.raises(
        untorch.ArgumentTypeError, match="argument 0: __cuda_array_interface__: expected a dictionary, got int"
    ):
        linear(array_like(__cuda_array_interface__=3))


def test_other_exceptions_of_a_protocol(linear: untorch.Method) -> None:
    with pytest.raises(untorch.OutOfMemoryError, match="argument 0: __dlpack__ of Made raised MemoryError"):
        linear(array_like(__dlpack__=failing(MemoryError()), __dlpack_device__=lambda _: (1, 0)))
    with pytest.raises(KeyboardInterrupt):
        linear(array_like(__dlpack__=failing(KeyboardInterrupt()), __dlpack_device__=lambda _: (1, 0)))
    error = untorch.ClosedError("mine")
    with pytest.raises(untorch.ClosedError) as caught:
        linear(array_like(__dlpack__=failing(error), __dlpack_device__=lambda _: (1, 0)))
    assert caught.value is error


def test_deeply_nested_arguments(linear: untorch.Method, forms_package: pathlib.Path) -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    a = np.ones(4, np.float32)
    with untorch.load(forms_package) as program:
        calls = [
            lambda: linear(deep),
            lambda: program({"a": deep, "b": a}, [(a, a), a], True, scale=a),
            lambda: program({"a": a, "b": a}, deep, True, scale=a),
            lambda: program({"a": a, "b": a}, [(a, a), a], deep, scale=a),
            lambda: linear(np.ones((2, 4), np.float32), out=deep),
        ]
        for call in calls:
            with pytest.raises(untorch.InvalidArgumentError):
                call()
        with pytest.raises(untorch.InvalidArgumentError, match="got an object of the type list; export it again"):
            calls[3]()


def test_a_system_error_pickles() -> None:
    for error in untorch.SystemResourceError("x is busy"), untorch.SystemResourceError("x is busy", errno.EAGAIN):
        copied = pickle.loads(pickle.dumps(error))
        assert (str(copied), copied.errno) == ("x is busy", error.errno)
    assert error.strerror == os.strerror(errno.EAGAIN)
