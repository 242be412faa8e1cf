"""untorch.Predictor, and calls with columns."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.runtime.columns import batch_dim, run_columns

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def expected(x: Any) -> Any:
    return np.asarray(x, np.float32) @ np.arange(12, dtype=np.float32).reshape(3, 4).T + np.float32([10, 20, 30])


@pytest.fixture
def predictor(own_package: pathlib.Path) -> untorch.Predictor:
    return untorch.Predictor(own_package, "linear", num_threads=1)


def test_arrays(predictor: untorch.Predictor) -> None:
    np.testing.assert_allclose(predictor(X), expected(X))
    np.testing.assert_allclose(predictor(x=X), expected(X))
    np.testing.assert_array_equal(predictor.method(X), predictor(X))
    assert predictor.program.methods == ["alias", "counter", "linear", "types"]


def test_columns(predictor: untorch.Predictor) -> None:
    for column in (X, X.astype(np.float64), X.tolist(), list(X), np.asfortranarray(X), X[::-1][::-1]):
        result = predictor({"x": column})
        assert list(result) == ["output"] and result["output"].dtype == np.float32
        np.testing.assert_allclose(result["output"], expected(X))
    objects = np.empty(2, object)
    objects[:] = list(X)
    np.testing.assert_allclose(predictor({"x": objects})["output"], expected(X))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 200])
def test_more_rows_than_a_call_takes(predictor: untorch.Predictor, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 4), np.float32)
    result = predictor({"x": x})["output"]
    assert result.shape == (rows, 3)
    np.testing.assert_allclose(result, expected(x), rtol=1e-5, atol=1e-5)


def test_no_rows(predictor: untorch.Predictor) -> None:
    for column in (np.empty((0, 4), np.float32), [], np.empty(0, object)):
        result = predictor({"x": column})["output"]
        assert result.shape == (0, 3) and result.dtype == np.float32


def test_only_columns_are_cut(own_package: pathlib.Path) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match="must be from 1 to 64"):
        untorch.Predictor(own_package, "linear")(np.ones((65, 4), np.float32))


def test_methods_without_a_batch_dimension(own_package: pathlib.Path, forms_package: pathlib.Path) -> None:
    assert batch_dim(untorch.Predictor(own_package, "linear").method).max == 64  # type: ignore[union-attr]
    for name in ("alias", "counter", "types"):
        assert batch_dim(untorch.Predictor(own_package, name).method) is None
    a = np.ones(4, np.float32)
    result = untorch.Predictor(own_package, "alias")({"x": a})
    assert list(result) == ["output_0", "output_1", "output_2"]
    forms = untorch.Predictor(forms_package)  # one output is None
    names = [spec.name for spec in forms.method.inputs]
    result = forms({name: 2 if name == "scale" else a for name in names})
    assert list(result) == ["output_0[0]", "output_1['b']", "output_1['c'][0]", "output_1['c'][1]"]
    np.testing.assert_array_equal(result["output_0[0]"], 2 * a)


def test_a_stock_package_numbers_its_columns(stock_linear: pathlib.Path) -> None:
    result = untorch.Predictor(stock_linear)({"0": X})
    np.testing.assert_allclose(result["0"], expected(X))


def test_every_dtype(own_package: pathlib.Path) -> None:
    types = untorch.Predictor(own_package, "types")
    columns = {spec.name: np.ones(spec.shape, np.uint8) for spec in types.method.inputs}  # type: ignore[arg-type]
    columns["tensors[9]"] = columns["tensors[9]"].astype(bool)
    for name in ("tensors[4]",):
        columns[name] = columns[name].astype(np.int8)
    result = types(columns)
    assert result["same[3]"].dtype.name == "bfloat16" and result["same[11]"].dtype == np.complex128
    for i in range(12):
        np.testing.assert_array_equal(result[f"same[{i}]"].astype(np.complex128), 1)


def test_errors(predictor: untorch.Predictor) -> None:
    for columns, text in (
        ({}, "^method 'linear': expected the columns x, got none$"),
        ({"x": X, "y": X}, "^method 'linear': expected the columns x, got x, y$"),
        (
            {"x": [[1.0], [1.0, 2.0]]},
            "^method 'linear', input 'x': expected rows of numbers of one shape, got rows that",
        ),
        ({"x": ["a", "b"]}, "method 'linear', argument 0: numpy dtype <U1 has no counterpart"),
        ({"x": X.astype(np.complex64)}, "expected float32.*got complex64"),
        ({"x": X[:, :3]}, "dimension 1 must be 4"),
    ):
        with pytest.raises(untorch.InvalidArgumentError, match=text):
            predictor(columns)


def test_wrong_arguments(own_package: pathlib.Path) -> None:
    with pytest.raises(
        untorch.ArgumentTypeError, match="^Predictor: path: expected a path .*, got bytes: a predictor is"
    ):
        untorch.Predictor(own_package.read_bytes())  # type: ignore[arg-type]
    with pytest.raises(
        untorch.ArgumentTypeError, match="^Predictor: method: expected a method's name as a string, got 3"
    ):
        untorch.Predictor(own_package, 3)  # type: ignore[arg-type]
    with pytest.raises(
        untorch.ArgumentTypeError,
        match="^Predictor: expected options of untorch.load, got 'num_thread': did you mean 'num_threads'",
    ):
        untorch.Predictor(own_package, num_thread=3)
    with pytest.raises(untorch.ArgumentTypeError, match="got 'zebra': there are device, num_runners"):
        untorch.Predictor(own_package, zebra=3)
    with pytest.raises(untorch.InvalidArgumentError, match="num_runners: expected an integer from 1 to 1024, got 0"):
        untorch.Predictor(own_package, num_runners=0)
    with pytest.raises(untorch.UnknownMethodError, match="has no method 'nope'"):
        untorch.Predictor(own_package, "nope")(X)


def test_it_loads_at_its_first_call(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "later.pt2"
    predictor = untorch.Predictor(path, "linear")
    with pytest.raises(FileNotFoundError):
        predictor(X)
    path.write_bytes(own_package.read_bytes())
    np.testing.assert_allclose(predictor(X), expected(X))


def test_it_pickles_as_its_path(
    own_package: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_package.parent)
    predictor = untorch.Predictor(own_package.name, "linear", num_threads=1)
    predictor(X)
    text = pickle.dumps(predictor)
    assert len(text) < 1000
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(text)
    np.testing.assert_array_equal(again(X), predictor(X))
    assert again.program is predictor.program  # one program a process
    assert untorch.Predictor(own_package, "alias", num_threads=1).program is predictor.program
    assert untorch.Predictor(own_package, "linear").program is not predictor.program
    assert repr(again) == repr(predictor) == f"untorch.Predictor({str(own_package)!r}, 'linear', num_threads=1)"
    assert pickle.loads(pickle.dumps(again)).path == str(own_package)


def test_a_policy_travels_with_it(own_package: pathlib.Path) -> None:
    policy = untorch.TrustPolicy(hashes=("sha256:" + "0" * 64,))
    predictor = pickle.loads(pickle.dumps(untorch.Predictor(own_package, "linear", trust=policy)))
    with pytest.raises(untorch.UntrustedError):
        predictor(X)


def test_it_loads_again_what_was_closed(predictor: untorch.Predictor) -> None:
    predictor(X)
    predictor.program.close()
    np.testing.assert_allclose(predictor(X), expected(X))


def test_threads_load_once(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(own_package.read_bytes())
    predictors = [untorch.Predictor(path, "linear") for _ in range(2)]
    barrier, results = threading.Barrier(8), []

    def run(i: int) -> None:
        barrier.wait()
        results.append((predictors[i % 2](X), predictors[i % 2].program))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(program) for _, program in results}) == 1
    for y, _ in results:
        np.testing.assert_allclose(y, expected(X))


def work(task: tuple[untorch.Predictor, Any]) -> tuple[int, int, Any]:
    predictor, x = task
    return os.getpid(), id(predictor.program), predictor(x)


@pytest.mark.parametrize("loaded", [False, True])
def test_forked_workers(own_package: pathlib.Path, loaded: bool) -> None:
    predictor = untorch.Predictor(own_package, "linear", num_threads=1)
    if loaded:
        predictor(X)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map(work, [(predictor, X + i) for i in range(12)], chunksize=1)
    for i, (process, _, y) in enumerate(results):
        assert process != os.getpid()
        np.testing.assert_allclose(y, expected(X + i), rtol=1e-6)


def test_spawned_workers_load_once(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing, os, sys
import numpy, untorch

def work(task):
    predictor, x = task
    assert "torch" not in sys.modules
    return os.getpid(), id(predictor.program), predictor({"x": x})["output"].sum()

if __name__ == "__main__":
    predictor = untorch.Predictor(sys.argv[1], "linear", num_threads=1)
    x = numpy.ones((100, 4))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(work, [(predictor, x * i) for i in range(12)], chunksize=1)
    programs = {}
    for process, program, _ in results:
        programs.setdefault(process, set()).add(program)
    assert os.getpid() not in programs
    print({len(found) for found in programs.values()}, [float(value) for _, _, value in results][:3])
"""
    )
    done = subprocess.run([sys.executable, str(script), str(own_package)], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == "{1} [6000.0, 12600.0, 19200.0]\n"


@pytest.mark.slow
def test_pandas(predictor: untorch.Predictor) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": [7, 8], "x": list(X.astype(np.float64))})
    np.testing.assert_allclose(predictor(frame)["output"], expected(X))
    np.testing.assert_allclose(predictor(frame["x"]), expected(X))
    with pytest.raises(untorch.InvalidArgumentError, match="expected the columns x, got none"):
        predictor(frame[["id"]])
    # What a pandas UDF of Spark does: Series in, a Series of lists out.
    result = pandas.Series(list(predictor({"x": frame["x"]})["output"]))
    np.testing.assert_allclose(np.stack(result), expected(X))


def test_dask(predictor: untorch.Predictor) -> None:
    pytest.importorskip("dask")
    import dask

    parts = [X + i for i in range(6)]
    tasks = [dask.delayed(predictor)(part) for part in parts]
    for scheduler in ("threads", "processes"):
        results = dask.compute(*tasks, scheduler=scheduler, num_workers=2)
        for part, result in zip(parts, results, strict=True):
            np.testing.assert_allclose(result, expected(part), rtol=1e-6)


class FakeMethod:
    """Columns against a method that notes its calls."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        from untorch.runtime.spec import parse_specs

        self.name, self._spec = "fake", {"outputs": outputs}
        self.inputs, self.outputs = parse_specs(inputs), parse_specs(outputs)
        self.calls: list[Any] = []

    def run(self, inputs: Any) -> Any:
        self.calls.append([array.shape for array in inputs])
        return [inputs[0] * 2]


def spec(name: str, *shape: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": list(shape), **more}


B, N = {"symbol": "b", "min": 3, "max": 8}, {"symbol": "n", "min": 1, "max": 9}


def test_parts_are_of_nearly_equal_size() -> None:
    fake: Any = FakeMethod([spec("x", B, 2), spec("m", B)], [spec("y", B, 2)])
    x = np.arange(34, dtype=np.float32).reshape(17, 2)
    result = run_columns(fake, {"x": x, "m": x[:, 0]})
    np.testing.assert_array_equal(result["y"], 2 * x)
    assert fake.calls == [[(5, 2), (5,)], [(6, 2), (6,)], [(6, 2), (6,)]]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([spec("x", B, 2), spec("m", N)], [spec("y", B)]),  # two symbols
        ([spec("x", B, 2)], [spec("y", 1)]),  # an output over all rows
        ([spec("x", B, 2)], [spec("y", B), None]),
        ([spec("x", B, B)], [spec("y", B)]),
        ([spec("x", B)], [spec("y", B, {"expr": "2*b", "rpn": ["b", 2, "*"]})]),
        ([spec("x", B)], [spec("y", B, {"expr": "f(b)"})]),
        ([spec("x", 8, 2)], [spec("y", 8)]),
        ([spec("x", B, 2)], [spec("y", B), {"name": "flag", "constant": True}]),
        ([spec("x", B, 2, contiguous=False)], [spec("y", B)]),
        ([], []),
    ],
)
def test_what_has_no_batch_dimension(inputs: Any, outputs: Any) -> None:
    fake: Any = FakeMethod(inputs, outputs)
    assert batch_dim(fake) is None


def test_no_rows_and_a_size_that_is_not_known() -> None:
    fake: Any = FakeMethod([spec("x", B, N)], [spec("y", B, N, 3)])
    assert run_columns(fake, {"x": np.empty((0, 5), np.float32)})["y"].shape == (0, 5, 3)
    other: Any = FakeMethod([spec("x", B, N)], [spec("y", B, {"expr": "2*n", "rpn": ["n", 2, "*"]})])
    with pytest.raises(
        untorch.InvalidArgumentError,
        match="^method 'fake': expected at least one row, as the size 2\\*n of the output 'y' follows from the values, got none$",
    ):
        run_columns(other, {"x": np.empty((0, 5), np.float32)})
    assert fake.calls == other.calls == []


def test_a_written_column_is_copied_if_it_must_not_be_written() -> None:
    fake: Any = FakeMethod([spec("x", 3, mutated=True)], [spec("y", 3)])
    x = np.ones(3, np.float32)
    x.flags.writeable = False
    run_columns(fake, {"x": x})
    from untorch.runtime.columns import as_array

    assert as_array(x, "fake", "x", fake.inputs[0]).flags.writeable
    x.flags.writeable = True
    assert as_array(x, "fake", "x", fake.inputs[0]) is x
