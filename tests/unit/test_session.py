"""Sessions: buffers of their own, shared by methods, on shared weights."""

from __future__ import annotations

import gc
import shutil
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import untorch
from untorch import _core

X = np.ones(4, np.float32)
ONE = np.ones((), np.float32)


@pytest.fixture
def program(cache_package: Path) -> Iterator[untorch.Program]:
    with untorch.load(cache_package) as loaded:
        yield loaded


def row(program: untorch.Program, x: np.ndarray) -> np.ndarray:
    return np.asarray(program.plain(x))


@pytest.mark.slow
def test_methods_share_the_buffers_that_they_name(program: untorch.Program) -> None:
    session = program.session()
    for i in range(3):
        assert session.put(X * i) == i
    rows, filled = session.get(ONE)
    assert filled == 3
    np.testing.assert_array_equal(rows[:3], [row(program, X * i) for i in range(3)])
    assert (rows[3:] == 0.25).all()
    rows, filled = program.get(ONE)  # the program's own calls are another session
    assert filled == 0 and (rows == 0.25).all()


def test_sessions_are_apart(program: untorch.Program) -> None:
    first, second = program.session(), program.session()
    for _ in range(3):
        first.put(X)
    second.put(X * 5)
    assert first.get(ONE)[1] == 3 and second.get(ONE)[1] == 1
    np.testing.assert_array_equal(second.get(ONE)[0][0], row(program, X * 5))


def test_reset(program: untorch.Program) -> None:
    first, second = program.session(), program.session()
    for session in (first, second):
        session.put(X)
    first.reset()
    rows, filled = first.get(ONE)
    assert filled == 0 and (rows == 0.25).all()
    assert second.get(ONE)[1] == 1
    program.put(X)
    program.reset()
    assert program.get(ONE)[1] == 0


def test_zeros_of_the_file_are_read_once(cache_package: Path, tmp_path: Path) -> None:
    """The file has other bytes in their place when they are set again, by any session of the program."""
    path = tmp_path / "cache.pt2"
    shutil.copyfile(cache_package, path)
    with untorch.load(path) as program:
        session, other = program.session(), program.session()
        for one in (session, other):
            one.put(X)
        session.reset()
        (entry,) = [state for state in program.manifest["states"] if state["fqn"] == "filled"]
        weight = program.manifest["weights"][entry["weight"]]
        with zipfile.ZipFile(path) as archive:
            (info,) = [info for info in archive.infolist() if info.filename.endswith(weight["file"])]
        with path.open("r+b") as file:
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            file.seek(info.header_offset + 30 + name + extra)
            assert file.read(8) == bytes(8)
            file.seek(-8, 1)
            file.write(b"\1" * 8)
        for one in (session, other, session.fork()):
            one.put(X)
            one.reset()
            assert one.get(ONE)[1] == 0


def test_fork(program: untorch.Program) -> None:
    first = program.session()
    first.put(X)
    second = first.fork()
    second.put(X * 2)
    first.put(X * 3)
    np.testing.assert_array_equal(second.get(ONE)[0][:2], [row(program, X), row(program, X * 2)])
    np.testing.assert_array_equal(first.get(ONE)[0][:2], [row(program, X), row(program, X * 3)])
    fresh = program.session().fork()  # nothing has been made yet
    assert fresh.get(ONE)[1] == 0


def test_memory(program: untorch.Program) -> None:
    session = program.session()
    assert session.nbytes == 0
    session.put(X)
    assert session.nbytes == 8 * 4 * 4 + 8
    assert program.memory()["state"] == 0
    program.get(ONE)
    assert program.memory()["state"] == 8 * 4 * 4 + 8
    weights = [entry["nbytes"] for entry in program.manifest["weights"]]
    assert sorted(weights) == [8, 4 * 4 * 4, 8 * 4 * 4]  # one weight for three methods


def test_the_manifest_says_what_is_shared(program: untorch.Program) -> None:
    states = {state["fqn"]: state["methods"] for state in program.manifest["states"]}
    assert states == {"rows": ["put", "get"], "filled": ["put", "get"]}


def test_interleaved_sessions_on_threads(program: untorch.Program) -> None:
    """Each thread fills sessions of its own, in turns, beside all others."""
    errors: list[BaseException] = []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            sessions = [program.session() for _ in range(3)]
            gate.wait(30)
            for i in range(8):
                for s, session in enumerate(sessions):
                    assert session.put(X * (100 * number + 10 * s + i)) == i
            for s, session in enumerate(sessions):
                rows, filled = session.get(ONE)
                assert filled == 8
                expected = [row(program, X * (100 * number + 10 * s + i)) for i in range(8)]
                np.testing.assert_array_equal(rows, expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_threads_on_one_session(program: untorch.Program) -> None:
    session = program.session()
    numbers: list[int] = []

    def work() -> None:
        numbers.extend(int(session.put(X)) for _ in range(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(8))


def test_closing(cache_package: Path) -> None:
    program = untorch.load(cache_package)
    session, other = program.session(), program.session()
    put = session.put
    put(X)
    session.close()
    for call in (lambda: put(X), lambda: session.get(ONE), session.reset, session.fork):
        with pytest.raises(untorch.ClosedError, match="session is closed"):
            call()
    assert other.put(X) == 0 and program.get(ONE)[1] == 0
    fork = other.fork()
    program.close()
    for closed in (other, fork):
        with pytest.raises(untorch.ClosedError, match="session is closed"):
            closed.put(X)
    with pytest.raises(untorch.ClosedError, match="the program is closed"):
        program.session()
    assert "closed" in repr(session)


@pytest.mark.slow
def test_a_session_keeps_its_program(cache_package: Path) -> None:
    session = untorch.load(cache_package).session()
    gc.collect()
    assert session.put(X) == 0 and sorted(session.program.methods) == ["get", "plain", "put"]
    with session as same:
        assert same is session


@pytest.mark.slow
def test_outputs_that_are_buffers_stay_valid(program: untorch.Program) -> None:
    row(program, X)  # opens the program's own method
    gc.collect()
    before = _core.live_tensors()
    session = program.session()
    session.put(X)
    rows = session.get(ONE)[0]
    session.close()
    del session
    gc.collect()
    np.testing.assert_array_equal(rows[0], row(program, X))
    del rows
    gc.collect()
    assert _core.live_tensors() == before


def test_a_program_without_buffers(own_package: Path) -> None:
    with untorch.load(own_package) as program, program.session() as session:
        x = np.ones((2, 4), np.float32)
        np.testing.assert_array_equal(session.linear(x), program.linear(x))
        first, second = session.counter(x[0]), session.counter(x[0])
        np.testing.assert_array_equal(second - first, 1)
        with pytest.raises(untorch.InvalidArgumentError, match="has no method 'nothing'"):
            session["nothing"]
        with pytest.raises(untorch.InvalidArgumentError, match="several methods"):
            session(x)


def test_a_stock_package(stock_linear: Path) -> None:
    with untorch.load(stock_linear) as program, program.session() as session:
        x = np.ones((2, 4), np.float32)
        np.testing.assert_array_equal(session.forward(x), program.forward(x))
