"""Served models in this process: layouts, stock packages, names, replacing a package, statuses of errors."""

from __future__ import annotations

import asyncio
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from untorch.runtime.errors import (
    ClosedError,
    InvalidArgumentError,
    InvalidFileError,
    ModelError,
    OutOfMemoryError,
    UnsupportedError,
)
from untorch.runtime.spec import TensorSpec
from untorch.serve.errors import (
    BodyTooLargeError,
    DeadlineError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    status_of,
)
from untorch.serve.model import _fit
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Repository, model_name


def infer(repository: Repository, name: str, **inputs: Any) -> Any:
    return asyncio.run(repository.get(name).infer(inputs, {}, 20))


def test_layouts() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    plain = TensorSpec("x", (2, 3), "float32")
    assert _fit(plain, array, "m", "x") is array
    columns = TensorSpec("x", (2, 3), "float32", contiguous=False, strides=(1, 2))
    got = _fit(columns, array, "m", "x")
    assert got.strides == (4, 8)
    assert got.tolist() == array.tolist()
    written = TensorSpec("x", (2, 3), "float32", mutated=True)
    array.flags.writeable = False  # as what lies in a request's body
    own = _fit(written, array, "m", "x")
    assert own.flags.writeable
    assert own.ctypes.data % 64 == 0
    assert own.tolist() == array.tolist()


@pytest.mark.slow
def test_a_stock_package(stock_linear: pathlib.Path) -> None:
    """It describes nothing: inputs have numbers, calls are not joined."""
    repository = Repository(ServeOptions(models={"s": str(stock_linear)}))
    repository.load_all()
    model = repository.get("s")
    assert (model.inputs, model.outputs) == ((), ())
    assert model.describe()["batching"]["reason"] == "the package does not describe the method's inputs"
    x = np.ones((2, 4), np.float32)
    assert infer(repository, "s", **{"0": x})["output_0"].tolist() == [[16.0, 42.0, 68.0]] * 2
    with pytest.raises(InvalidArgumentError, match="model 's': expected the inputs 0, got x"):
        infer(repository, "s", x=x)
    repository.close()


def test_names_of_models() -> None:
    assert model_name("p", "forward", ["encode", "forward"]) == "p"
    assert model_name("p", "encode", ["encode", "forward"]) == "p.encode"
    assert model_name("p", "model", ["model"]) == "p"


def test_a_name_that_is_taken(own_package: pathlib.Path, stock_linear: pathlib.Path) -> None:
    repository = Repository(ServeOptions(models={"a": str(own_package), "a.linear": str(stock_linear)}))
    text = "package 'a.linear' serves a.linear, which another package serves already: rename the file"
    with pytest.raises(InvalidArgumentError, match=text):
        repository.load_all()
    assert infer(repository, "a.linear", x=np.ones((1, 4), np.float32))["output"].tolist() == [[16.0, 42.0, 68.0]]
    repository.close()


def test_a_package_is_replaced(own_package: pathlib.Path, stock_linear: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt2"
    shutil.copy(own_package, path)
    repository = Repository(ServeOptions(repository=str(tmp_path)))
    repository.load_all()
    assert "m.linear" in repository.models
    old = repository.get("m.linear")
    shutil.copy(stock_linear, tmp_path / "new")
    (tmp_path / "new").rename(path)
    repository.poll()
    assert set(repository.models) == {"m"}
    with pytest.raises(ClosedError, match=r"model 'm\.linear' is unloaded"):
        asyncio.run(old.infer({"x": np.ones((1, 4), np.float32)}, {}, 20))
    # A file that cannot be loaded leaves what is there.
    path.with_name("new").write_bytes(b"no package")
    path.with_name("new").rename(path)
    with pytest.raises(InvalidFileError):
        repository.load("m")
    assert infer(repository, "m", **{"0": np.ones((2, 4), np.float32)})
    # A look at the folder tries each file once, and again when it is replaced.
    repository.unload("m")
    repository.poll()
    with pytest.raises(NotReadyError, match="model 'm' is not loaded: unloaded"):
        repository.get("m")
    shutil.copy(own_package, tmp_path / "new")
    (tmp_path / "new").rename(path)
    repository.poll()
    assert "m.linear" in repository.models
    repository.unload("m")
    with pytest.raises(NotReadyError, match="model 'm' is not loaded: unloaded"):
        repository.get("m")
    path.unlink()
    repository.poll()
    with pytest.raises(ModelNotFoundError, match="no model is named 'm', there are: none"):
        repository.get("m")


@pytest.mark.parametrize(
    ("error", "http", "grpc"),
    [
        (ModelNotFoundError(""), 404, "NOT_FOUND"),
        (BodyTooLargeError(""), 413, "RESOURCE_EXHAUSTED"),
        (QueueFullError(""), 429, "RESOURCE_EXHAUSTED"),
        (DeadlineError(""), 504, "DEADLINE_EXCEEDED"),
        (NotReadyError(""), 503, "UNAVAILABLE"),
        (ClosedError(""), 503, "UNAVAILABLE"),
        (OutOfMemoryError(""), 503, "RESOURCE_EXHAUSTED"),
        (MemoryError(), 503, "RESOURCE_EXHAUSTED"),
        (InvalidArgumentError(""), 400, "INVALID_ARGUMENT"),
        (UnsupportedError(""), 501, "UNIMPLEMENTED"),
        (InvalidFileError(""), 500, "INTERNAL"),
        (ModelError(""), 500, "INTERNAL"),
        (ZeroDivisionError(), 500, "INTERNAL"),
    ],
)
def test_statuses(error: Exception, http: int, grpc: str) -> None:
    assert status_of(error) == (http, grpc)
