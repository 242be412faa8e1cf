"""load, Program and Method: what they accept, what they refuse, and that nothing is left behind."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import untorch
from untorch import _core


@pytest.fixture
def x() -> np.ndarray[Any, Any]:
    return np.arange(8, dtype=np.float32).reshape(2, 4)


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The linear method, by numpy."""
    result: np.ndarray[Any, Any] = x @ np.arange(12, dtype=np.float32).reshape(3, 4).T + np.float32([10, 20, 30])
    return result


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_runners": 0}, ValueError, "load: num_runners: expected an integer from 1 to 1024, got 0"),
        ({"num_runners": 1 << 70}, ValueError, "load: num_runners: expected an integer from 1 to 1024"),
        ({"num_runners": True}, TypeError, "load: num_runners: expected an integer from 1 to 1024, got True"),
        ({"num_threads": -1}, ValueError, "load: num_threads: expected an integer from 0 to 1024, got -1"),
        ({"num_threads": 1.5}, TypeError, "load: num_threads: expected an integer from 0 to 1024, got 1.5"),
        (
            {"cuda_graphs": -1},
            ValueError,
            "load: cuda_graphs: expected an integer from 0 to 1024, got -1",
        ),
        ({"cuda_graphs": True}, TypeError, "load: cuda_graphs: expected an integer from 0 to 1024, got True"),
        (
            {"spin_us": -1},
            ValueError,
            "load: spin_us: expected an integer from 0 to 1000000 (microseconds), or None, got -1",
        ),
        (
            {"spin_us": True},
            TypeError,
            "load: spin_us: expected an integer from 0 to 1000000 (microseconds), or None, got True",
        ),
        ({"num_threads": 100000}, ValueError, "load: num_threads: expected an integer from 0 to 1024, got 100000"),
        ({"dequantize_weights": 1}, TypeError, "load: dequantize_weights: expected True or False, got 1"),
        ({"dequantize_weights": True}, ValueError, "dequantize_weights: expected a file with methods for a GPU, "),
        ({"tf32": 1}, TypeError, "load: tf32: expected True, False or None, got 1"),
        ({"device": 3}, TypeError, "load: device: expected a string such as 'cpu' or 'cuda:0', got 3"),
        ({"device": "tpu"}, ValueError, "unknown device 'tpu'"),
        ({"device": "cuda"}, ValueError, "was compiled for cpu and cannot run on cuda: export it for that device"),
    ],
)
def test_options_are_checked(
    own_package: pathlib.Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(untorch.InvalidArgumentError) as caught:
        untorch.load(own_package, **options)
    assert text in str(caught.value)
    assert isinstance(caught.value, error)
    assert isinstance(caught.value, TypeError) == (error is TypeError)


def test_a_program_tells_about_itself(own_package: pathlib.Path) -> None:
    with untorch.load(str(own_package), device="cpu") as program:
        assert sorted(program.methods) == sorted(program) == ["alias", "counter", "linear", "types"]
        assert len(program) == 4
        assert program.path == str(own_package)
        assert not program.is_stock
        assert program.manifest["format"] == "untorch"
        assert program.linear is program["linear"]
        assert program.linear.name == "linear"
        assert [item.name for item in program.linear.inputs] == ["x"]
        assert program["types"].outputs[-1] is None
        assert repr(program.linear) == "<untorch.Method linear(x: float32[batch, 4])>"
        assert repr(program).startswith(f"<untorch.Program '{own_package}': alias, counter")
        page = program._repr_html_()
        assert "<td>linear</td><td>cpu</td><td>x: float32[batch, 4]</td>" in page and page.count("<tr>") == 5
        assert f"&lt;untorch.Program &#x27;{own_package}&#x27;" in page
    assert repr(program).endswith("(closed)>") and "<table>" not in program._repr_html_()


def test_where_numpy_has_half_types_from(own_package: pathlib.Path) -> None:
    with untorch.load(own_package) as program:
        method = program["types"]
        *tensors, scale = [
            np.zeros((2, 3) if spec.shape else (), "float32" if spec.dtype == "bfloat16" else spec.dtype)
            for spec in method.inputs
        ]
        with pytest.raises(
            untorch.InvalidArgumentError, match=r"convert it to bfloat16 \(in numpy: ml_dtypes.bfloat16\)"
        ):
            method(tensors, scale)


def mapped_libraries() -> list[str]:
    return [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "untorch-model" in line]


@pytest.mark.parametrize("kind", ["own", "stock"])
def test_looking_at_a_program_opens_nothing(
    kind: str, own_package: pathlib.Path, stock_linear: pathlib.Path, x: np.ndarray[Any, Any]
) -> None:
    """The file's code is mapped at the first call, or by Method.open."""
    path, name = (own_package, "linear") if kind == "own" else (stock_linear, "forward")
    before = mapped_libraries()
    with untorch.load(path) as program:
        assert hasattr(program, name) and not hasattr(program, "nope")
        assert program.methods and len(program) and list(program)
        if kind == "own":
            assert "linear" in dir(program) and "load" not in dir(program)
            assert program.linear.num_inputs == 1
        method = getattr(program, name)
        assert program[program.methods[-1]] is not None
        for seen in (repr(program), repr(method), dir(method), program.manifest, program.device, program.memory()):
            assert seen is not None
        assert [spec.name for spec in method.inputs] == (["x"] if kind == "own" else [])
        assert isinstance(method.outputs, tuple) and method.device == "cpu" and method.gpu_architecture is None
        session = program.session()
        assert hasattr(session, name) and repr(session)
        assert mapped_libraries() == before
        if kind == "own":
            np.testing.assert_allclose(method(x), expected(x), rtol=1e-6)
        else:
            assert method.num_inputs == 1  # a stock package does not tell: its library is opened
        assert mapped_libraries() != before


def test_open_opens(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    before = mapped_libraries()
    program = untorch.load(own_package)
    method = program.linear
    method.open()
    opened = mapped_libraries()
    assert opened != before
    method.open()
    np.testing.assert_allclose(method.run([x])[0], expected(x), rtol=1e-6)
    assert mapped_libraries() == opened
    late = program.alias
    program.close()
    with pytest.raises(untorch.ClosedError, match="method 'alias': the program is closed"):
        late.open()


def test_many_threads_make_the_first_call(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    wrong: list[object] = []

    def call(program: untorch.Program, start: threading.Barrier) -> None:
        start.wait()
        try:
            if not np.allclose(program.linear(x), expected(x)):
                wrong.append("values")
        except Exception as error:
            wrong.append(error)

    for _ in range(20):
        with untorch.load(own_package, num_runners=8) as program:
            start = threading.Barrier(8)
            threads = [threading.Thread(target=call, args=(program, start)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert wrong == []


def test_unknown_methods_are_named(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    with untorch.load(own_package) as program:
        with pytest.raises(KeyError) as caught:
            program["nope"]
        assert isinstance(caught.value, untorch.UnknownMethodError | untorch.InvalidArgumentError)
        # Without the quotes that str(KeyError) has.
        assert str(caught.value) == f"{own_package} has no method 'nope', there are: alias, counter, linear, types"
        assert "nope" not in program and "linear" in program
        with pytest.raises(TypeError) as wrong:
            program[0]  # type: ignore[index]
        assert str(wrong.value) == f"{own_package}: expected a method's name as a string, got 0"
        with pytest.raises(AttributeError, match="has no method 'forward'"):
            _ = program.forward
        with pytest.raises(AttributeError):
            _ = program._private
        with pytest.raises(untorch.InvalidArgumentError, match="has several methods, call one by name: alias"):
            program(x)


def test_dynamic_sizes_and_names(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    with untorch.load(own_package) as program:
        for batch in (1, 2, 7, 64):
            value = np.ones((batch, 4), np.float32)
            np.testing.assert_allclose(program.linear(value), expected(value), rtol=1e-6)
        np.testing.assert_allclose(program.linear(x=x), expected(x), rtol=1e-6)
        with pytest.raises(untorch.InvalidArgumentError, match="expected 1 positional arguments, got 2"):
            program.linear(x, x)
        with pytest.raises(untorch.InvalidArgumentError, match="unknown argument 'y'"):
            program.linear(x, y=x)
        with pytest.raises(untorch.InvalidArgumentError, match=r"it takes \(x: float32\[batch, 4\]\)"):
            program.linear()


def test_out_buffers_receive_copies(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    with untorch.load(own_package) as program:
        out = np.empty((2, 3), np.float32)
        assert program.linear(x, out=out) is out
        np.testing.assert_allclose(out, expected(x), rtol=1e-6)
        wide = np.empty((2, 6), np.float32)[:, ::2]
        assert program.linear(x, out=wide) is wide
        np.testing.assert_allclose(wide, expected(x), rtol=1e-6)
        with pytest.raises(
            untorch.InvalidArgumentError, match=r"out\[0\]: expected float32\[2, 3\], got float64\[2, 3\]"
        ):
            program.linear(x, out=np.empty((2, 3)))
        with pytest.raises(
            untorch.InvalidArgumentError, match=r"out\[0\]: expected a numpy array to write to, got list"
        ):
            program.linear(x, out=[1])
        out.setflags(write=False)
        with pytest.raises(untorch.InvalidArgumentError, match=r"out\[0\]: the array is read-only"):
            program.linear(x, out=out)
        row = np.empty(4, np.float32)
        given = np.arange(4, dtype=np.float32)
        results = program.alias(given, out=(None, None, row))
        assert results[2] is row
        np.testing.assert_array_equal(row, given * 2)


def test_buffers_keep_their_state(own_package: pathlib.Path) -> None:
    zero = np.zeros(4, np.float32)
    with untorch.load(own_package) as first, untorch.load(own_package) as second:
        assert [first.counter(zero)[0] for _ in range(3)] == [1, 2, 3]
        assert second.counter(zero)[0] == 1


def test_a_closed_program_refuses_calls(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    program = untorch.load(own_package)
    method = program.linear
    program.close()
    program.close()
    for call in (lambda: method(x), lambda: program.linear(x), lambda: program["alias"]):
        with pytest.raises(untorch.ClosedError, match=r"method '\w+': the program is closed"):
            call()


@pytest.mark.slow
def test_nothing_is_left_after_close(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    def use() -> None:
        with untorch.load(own_package) as program:
            program.linear(x)
            program.alias(x[0])
            with pytest.raises(untorch.InvalidArgumentError):
                program.linear(x[0])

    def descriptors() -> int:
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))

    use()
    gc.collect()
    tensors, files = _core.live_tensors(), descriptors()
    for _ in range(5):
        use()
    gc.collect()
    assert _core.live_tensors() == tensors
    assert descriptors() == files


def test_memory_stays_level(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

    with untorch.load(own_package) as program:
        linear, alias = program.linear, program.alias
        row = np.ones(4, np.float32)
        for _ in range(1000):
            linear(x)
            alias(row)
        tensors, before = _core.live_tensors(), resident()
        for _ in range(10000):
            linear(x)
            alias(row)
        assert _core.live_tensors() == tensors
        assert resident() - before < 2 << 20


@pytest.mark.parametrize("runners", [1, 4])
def test_threads_get_their_own_results(own_package: pathlib.Path, runners: int) -> None:
    wrong: list[str] = []
    with untorch.load(own_package, num_runners=runners, num_threads=1) as program:
        method = program.linear
        start = threading.Barrier(16)

        def work(seed: int) -> None:
            value = np.full((1 + seed % 4, 4), seed, np.float32)
            want = expected(value)
            start.wait()
            for _ in range(2000):
                got = method(value)
                if not np.allclose(got, want):
                    wrong.append(f"{seed}: {got}")
                    return

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_closing_while_others_run(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    errors: list[BaseException] = []
    for _ in range(10):
        program = untorch.load(own_package, num_runners=2)
        method = program.linear
        running = threading.Event()

        def work(method: untorch.Method = method, running: threading.Event = running) -> None:
            try:
                while True:
                    method(x)
                    running.set()
            except untorch.ClosedError:
                pass
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        running.wait(10)
        program.close()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_any_number_of_threads_gives_the_result(
    own_package: pathlib.Path, x: np.ndarray[Any, Any], threads: int
) -> None:
    with untorch.load(own_package, num_threads=threads) as program:
        np.testing.assert_allclose(program.linear(x), expected(x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
def test_numpy_comes_in_the_background(own_package: pathlib.Path, forks: bool) -> None:
    """Made slow here: the first use waits for the import, also in a fork, which has no thread that imports it."""
    code = f"""
import importlib.abc, os, sys, time
import untorch

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy.linalg":
            time.sleep(1)

assert "numpy" not in sys.modules
sys.meta_path.insert(0, Slow())
program = untorch.load({str(own_package)!r})
assert "numpy.linalg" not in sys.modules
child = os.fork() if {forks} else 0
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import numpy as np
print(np.ones(3).sum(), len(program))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0 4\n", "")
