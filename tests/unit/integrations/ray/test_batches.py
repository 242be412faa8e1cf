"""What Dataset.map_batches runs, without Ray."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.integrations.ray import BatchPredictor

IDS = np.arange(40).reshape(20, 2)
SCALE = np.linspace(0, 1, 20)  # float64


@pytest.mark.slow
def test_columns_in_columns_out(rows_package: pathlib.Path) -> None:
    predictor = BatchPredictor(rows_package, "rows", num_threads=1)
    batch = {"id": np.arange(20), "ids": IDS, "scale": SCALE}
    result = predictor(batch)  # more rows than a call takes
    assert list(result) == ["id", "ids", "scale", "scaled", "total", "half", "odd"]
    np.testing.assert_allclose(result["scaled"], IDS * SCALE[:, None], rtol=1e-6)
    np.testing.assert_array_equal(result["id"], np.arange(20))
    assert result["half"].dtype == np.float32 and result["total"].shape == (20,)


@pytest.mark.parametrize(("keep", "kept"), [(True, ["id", "ids", "factor"]), (False, []), (["id"], ["id"])])
def test_names_and_what_stays(rows_package: pathlib.Path, keep: Any, kept: list[str]) -> None:
    predictor = BatchPredictor(
        rows_package, "rows", inputs={"scale": "factor"}, outputs={"scaled": "y", "rows.odd": "z"}, keep=keep
    )
    result = predictor({"id": np.arange(20), "ids": IDS, "factor": SCALE})
    assert list(result) == [*kept, "y", "total", "half", "z"]


@pytest.mark.slow
def test_several_methods(own_package: pathlib.Path, rows_package: pathlib.Path) -> None:
    predictor = BatchPredictor(
        rows_package, ["rows", "embed"], inputs={"embed.input_ids": "ids", "attention_mask": "rows.odd"}, keep=False
    )
    result = predictor({"ids": IDS, "scale": SCALE})  # bool, which becomes int64
    assert list(result) == ["rows.scaled", "rows.total", "rows.half", "rows.odd", "embed.output"]
    with untorch.load(rows_package) as program:
        expected = program.embed(IDS[:8], (IDS[:8] % 2 == 1).astype(np.int64))
    np.testing.assert_allclose(result["embed.output"][:8], expected, rtol=1e-6)


def test_it_loads_when_it_is_made(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        BatchPredictor(tmp_path / "none.pt2")


def test_errors(rows_package: pathlib.Path) -> None:
    with pytest.raises(
        untorch.InvalidArgumentError,
        match=r"^BatchPredictor: method 'rows', input 'scale': expected the column 'scale', got ids: name it in "
        r"inputs=\{'scale': …\}$",
    ):
        BatchPredictor(rows_package, "rows")({"ids": IDS})
    with pytest.raises(
        untorch.ArgumentTypeError, match="^BatchPredictor: expected a dict of arrays, got list: use batch_f"
    ):
        BatchPredictor(rows_package, "rows")([IDS])  # type: ignore[arg-type]
    with pytest.raises(
        untorch.InvalidArgumentError, match="^BatchPredictor: inputs: expected ids, scale, rows.ids, .*, got no"
    ):
        BatchPredictor(rows_package, "rows", inputs={"no": "x"})
    with pytest.raises(
        untorch.InvalidArgumentError, match="^BatchPredictor: outputs: expected scaled, .*, got embed.output"
    ):
        BatchPredictor(rows_package, "rows", outputs={"embed.output": "x"})
    for methods in ([], ["rows", "rows"]):
        with pytest.raises(
            untorch.InvalidArgumentError, match="^BatchPredictor: methods: expected names that differ, got"
        ):
            BatchPredictor(rows_package, methods)
    with pytest.raises(untorch.ArgumentTypeError, match="did you mean 'num_threads'"):
        BatchPredictor(rows_package, "rows", num_thread=1)


def test_large_inputs_of_gpus_are_pinned(rows_package: pathlib.Path) -> None:
    with pytest.raises(
        untorch.InvalidArgumentError, match="^BatchPredictor: pinned: expected False, as the methods run on"
    ):
        BatchPredictor(rows_package, "rows", pinned=True)
    copied: list[Any] = []

    class Buffers:
        def copy(self, key: Any, array: Any) -> Any:
            copied.append((key, array.nbytes))
            return array.copy()

    class OnGpu:
        def __init__(self, method: Any) -> None:
            self.method, self.device, self.name, self.inputs = method, "cuda:0", method.name, method.inputs

    predictor = BatchPredictor(rows_package, "rows")
    method = predictor._predictors["rows"].method
    columns = {"ids": np.ones((40000, 2), np.int32), "scale": np.ones(40000)}
    predictor._buffers = Buffers()  # type: ignore[assignment]
    assert predictor._prepared(method, columns)["ids"].dtype == np.int64 and copied == []
    prepared = predictor._prepared(OnGpu(method), columns)  # type: ignore[arg-type]
    assert copied == [(("rows", "ids"), 640000)] and prepared["scale"].nbytes == 160000


@pytest.mark.slow
def test_a_stock_package(stock_linear: pathlib.Path) -> None:
    predictor = BatchPredictor(stock_linear, inputs={"0": "x"}, outputs={"0": "y"})
    assert list(predictor({"x": np.ones((2, 4))[:, :].astype(np.float32)})) == ["x", "y"]


def test_neither_ray_nor_torch_is_imported() -> None:
    code = "import sys; import untorch.integrations.ray; print([m for m in ('ray', 'torch', 'starlette') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    code = "import untorch.integrations.ray as r; r.nope"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'untorch.integrations.ray' has no attribute 'nope'" in done.stderr
