"""untorch triton: the files of a model repository, read by Triton's own description of config.pbtxt."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

import untorch
from untorch.integrations.triton import write_repository
from untorch.integrations.triton.config import check_servable, config_text, max_batch_size
from untorch.runtime.spec import parse_specs

B, N = {"symbol": "b", "min": 1, "max": 8}, {"symbol": "n", "min": 1, "max": None}


def read_config(path: pathlib.Path) -> Any:
    """As the server reads it; an unknown field or a wrong type is an error."""
    pytest.importorskip("google.protobuf")
    config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    return text_format.Parse(path.read_text(), config.ModelConfig())


class FakeMethod:
    def __init__(self, inputs: Any, outputs: Any, device: str = "cpu", constants: Any = ()) -> None:
        self.name, self.device = "fake", device
        self._spec = {"inputs": inputs, "outputs": outputs, "constants": constants}
        self.inputs, self.outputs = parse_specs(inputs), parse_specs(outputs)


def spec(name: str, *shape: Any, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def tensors(items: Any) -> list[Any]:
    from tritonclient.grpc import model_config_pb2

    return [
        (item.name, model_config_pb2.DataType.Name(item.data_type), list(item.dims), item.HasField("reshape"))
        for item in items
    ]


def test_a_repository(rows_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    written = write_repository(rows_package, tmp_path / "repository", name="demo", num_threads=2)
    assert written.models == {"embed": "demo_embed", "half": "demo_half", "rows": "demo_rows"}
    assert written.max_batch_sizes == {"embed": 8, "half": 0, "rows": 8} and written.left_out == {}
    folder = tmp_path / "repository" / "demo_rows"
    assert sorted(os.listdir(folder)) == ["1", "config.pbtxt"]
    assert sorted(os.listdir(folder / "1")) == ["model.pt2", "model.py"]
    packages = [tmp_path / "repository" / model / "1" / "model.pt2" for model in written.models.values()]
    assert [package.read_bytes() == rows_package.read_bytes() for package in packages] == [True] * 3
    assert os.path.samefile(*packages[:2]) and not os.path.samefile(packages[0], rows_package)
    config = read_config(folder / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("demo_rows", "python", 8)
    assert config.HasField("dynamic_batching")
    assert tensors(config.input) == [("ids", "TYPE_INT64", [-1], False), ("scale", "TYPE_FP32", [1], True)]
    assert tensors(config.output) == [
        ("scaled", "TYPE_FP32", [-1], False), ("total", "TYPE_FP32", [1], True), ("half", "TYPE_BF16", [-1], False),
        ("odd", "TYPE_BOOL", [-1], False),
    ]  # fmt: skip
    assert all(list(item.reshape.shape) == [] for item in (*config.input, *config.output))
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "method": "rows", "num_threads": "2",
    }  # fmt: skip
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, group_kind("KIND_CPU"))]
    config = read_config(tmp_path / "repository" / "demo_half" / "config.pbtxt")
    assert config.max_batch_size == 0 and not config.HasField("dynamic_batching")
    assert tensors(config.input) == [("x", "TYPE_BF16", [2, 3], False)]


def group_kind(name: str) -> Any:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2.ModelInstanceGroup.Kind.Value(name)


def test_what_cannot_be_served_is_left_out(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    written = write_repository(own_package, tmp_path)
    assert written.models == {"alias": "own_alias", "linear": "own_linear"}
    assert written.left_out == {
        "counter": "method 'counter' keeps values in buffers from call to call, and the requests of all clients would "
        "share them",
        "types": "method 'types', input 'tensors[10]': Triton has no data type for complex64",
    }
    assert sorted(os.listdir(tmp_path)) == ["own_alias", "own_linear"]
    with pytest.raises(untorch.UnsupportedError, match="^method 'counter' keeps values in buffers"):
        write_repository(own_package, tmp_path, method="counter")
    with pytest.raises(untorch.UnknownMethodError, match="has no method 'nope'"):
        write_repository(own_package, tmp_path, method="nope")


def test_a_second_version(rows_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write_repository(rows_package, tmp_path, method="rows", name="m")
    with pytest.raises(
        untorch.InvalidArgumentError, match=r"m_rows/1 is there already: remove it, or write another ver"
    ):
        write_repository(rows_package, tmp_path, method="rows", name="m", max_batch_size=4)
    assert read_config(tmp_path / "m_rows" / "config.pbtxt").max_batch_size == 8
    write_repository(rows_package, tmp_path, method="rows", name="m", max_batch_size=4, model_version=2)
    assert sorted(os.listdir(tmp_path / "m_rows")) == ["1", "2", "config.pbtxt"]
    assert read_config(tmp_path / "m_rows" / "config.pbtxt").max_batch_size == 4


def test_nothing_half_written_is_left(
    rows_package: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fails)
    with pytest.raises(OSError, match="No space left"):
        write_repository(rows_package, tmp_path, method="rows")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_copies_where_there_are_no_links(
    rows_package: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", fails)
    written = write_repository(rows_package, tmp_path)
    for model in written.models.values():
        assert (tmp_path / model / "1" / "model.pt2").read_bytes() == rows_package.read_bytes()


def test_wrong_arguments(rows_package: pathlib.Path, stock_linear: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for arguments, text in (
        ({"name": "a/b"}, "^write_repository: name: expected letters, digits, '_', '-' and '.', got 'a/b': give another"),
        ({"model_version": 0}, "^write_repository: model_version: expected 1 or more, got 0$"),
        ({"method": "rows", "max_batch_size": 9}, "^method 'rows': max_batch_size: expected 0 or a number from 1 to 8, got 9$"),
        ({"max_batch_size": 2}, "^method 'half': max_batch_size: expected 0, as its inputs and outputs do not all begin"),
    ):  # fmt: skip
        with pytest.raises(untorch.InvalidArgumentError, match=text):
            write_repository(rows_package, tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(untorch.UnsupportedError, match="a stock package does not tell its inputs and outputs"):
        write_repository(stock_linear, tmp_path)
    assert list(tmp_path.iterdir()) == []


def config_of(method: Any, tmp_path: pathlib.Path, name: str = "m", batch: int | None = None) -> Any:
    path = tmp_path / "config.pbtxt"
    path.write_text(config_text(name, method, max_batch_size(method, batch), {"method": 'q"uo\\te\n'}))
    return read_config(path)


def test_shapes(tmp_path: pathlib.Path) -> None:
    expression = {"expr": "2*n", "rpn": ["n", 2, "*"]}
    config = config_of(FakeMethod([spec("x", B, N, 3), spec("s", B)], [spec("y", B, expression)]), tmp_path)
    assert config.max_batch_size == 8
    assert tensors(config.input) == [("x", "TYPE_FP32", [-1, 3], False), ("s", "TYPE_FP32", [1], True)]
    assert tensors(config.output) == [("y", "TYPE_FP32", [-1], False)]
    assert config.parameters["method"].string_value == 'q"uo\\te\n'
    # Without batching the batch dimension is one of the dims.
    config = config_of(FakeMethod([spec("x", B, N)], [spec("y", B)]), tmp_path, batch=0)
    assert config.max_batch_size == 0
    assert tensors(config.input) == [("x", "TYPE_FP32", [-1, -1], False)]
    config = config_of(FakeMethod([spec("x", 2), spec("s")], [None, spec("y", dtype="int32")]), tmp_path)
    assert tensors(config.input) == [("x", "TYPE_FP32", [2], False), ("s", "TYPE_FP32", [1], True)]
    assert tensors(config.output) == [("y", "TYPE_INT32", [1], True)]
    config = config_of(FakeMethod([spec("x", {"symbol": "b", "min": 2, "max": None})], [spec("y", 1)]), tmp_path)
    assert config.max_batch_size == 0
    config = config_of(FakeMethod([spec("x", {"symbol": "b", "max": None})], [spec("y", {"symbol": "b"})]), tmp_path)
    assert config.max_batch_size == 64


def test_a_gpu(tmp_path: pathlib.Path) -> None:
    config = config_of(FakeMethod([spec("x", 2)], [spec("y", 2)], "cuda:0"), tmp_path)
    assert config.instance_group[0].kind == group_kind("KIND_GPU")
    assert config.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ([], [spec("y", 2)], "method 'fake' has no tensor inputs, and Triton needs one"),
        ([spec("x", 2)], [None], "method 'fake' has no tensor outputs, and Triton needs one"),
        (
            [spec("x", 2, mutated=True)],
            [spec("y", 2)],
            "method 'fake' writes into its input 'x', and a client would not",
        ),
        (
            [spec("x", 2)],
            [spec("y", 2, dtype="float8_e4m3fn")],
            "output 'y': Triton has no data type for float8_e4m3fn",
        ),
    ],
)
def test_refusals(inputs: Any, outputs: Any, text: str) -> None:
    method: Any = FakeMethod(inputs, outputs)
    with pytest.raises(untorch.UnsupportedError, match=text):
        check_servable(method)


def test_a_package_of_which_nothing_can_be_served(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with untorch.load(own_package) as program:
        from untorch.integrations.triton import repository

        class Only:
            path = program.path

            def __getitem__(self, name: str) -> Any:
                return program[name]

            def __iter__(self) -> Any:
                return iter(["counter"])

        with pytest.raises(
            untorch.UnsupportedError, match=r"own.pt2: Triton can serve no method: method 'counter' keeps"
        ):
            repository._configs(Only(), "own", None, None, 0)  # type: ignore[arg-type]
