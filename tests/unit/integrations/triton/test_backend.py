"""model.py of a Triton repository, in a stand-in for the server's python backend."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from untorch.integrations.triton import write_repository

spec = importlib.util.spec_from_file_location("triton_stand_in", pathlib.Path(__file__).with_name("stand_in.py"))
assert spec is not None and spec.loader is not None
utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(utils)


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    utils.install(monkeypatch)


def load_model(folder: pathlib.Path) -> Any:
    """model.py as the stub imports it."""
    spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


def arguments(folder: pathlib.Path, change: Callable[[dict[str, Any]], None] | None = None) -> dict[str, str]:
    """What the server passes to initialize: config.pbtxt as JSON, and where it is."""
    pytest.importorskip("google.protobuf")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import json_format, text_format

    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config.ModelConfig())
    document = json_format.MessageToDict(config, preserving_proto_field_name=True)
    if change is not None:
        change(document)
    return {
        "model_config": json.dumps(document), "model_instance_kind": "CPU", "model_instance_name": f"{folder.name}_0",
        "model_instance_device_id": "0", "model_repository": str(folder), "model_version": "1",
        "model_name": folder.name,
    }  # fmt: skip


@pytest.fixture
def repository(rows_package: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    write_repository(rows_package, tmp_path, name="m", num_threads=1)
    return tmp_path


class Counted:
    """A method that notes the rows of its calls."""

    def __init__(self, method: Any, calls: list[int]) -> None:
        self.method, self.calls = method, calls

    def run(self, inputs: Any) -> Any:
        self.calls.append(len(inputs[0]))
        return self.method.run(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)


@pytest.fixture
def rows(repository: pathlib.Path) -> Iterator[Any]:
    model = load_model(repository / "m_rows")
    model.initialize(arguments(repository / "m_rows"))
    calls: list[int] = []
    method = model._method
    model._method = Counted(method, calls)
    model.calls = calls
    yield model
    model.finalize()


def request(ids: Any, scale: Any, *outputs: str, cancelled: bool = False) -> Any:
    tensors = [utils.Tensor("scale", np.asarray(scale, np.float32)), utils.Tensor("ids", np.asarray(ids))]
    return utils.InferenceRequest(tensors, list(outputs), cancelled)


def check(response: Any, ids: Any, scale: Any) -> None:
    scaled = np.asarray(ids) * np.asarray(scale, np.float32)[:, None]
    assert not response.has_error(), response.error().message()
    values = response.values()
    assert list(values) == ["scaled", "total", "half", "odd"]
    np.testing.assert_allclose(values["scaled"], scaled, rtol=1e-6)
    np.testing.assert_allclose(values["total"], scaled.sum(1))
    assert values["half"].dtype.name == "bfloat16"
    np.testing.assert_allclose(values["half"].astype(np.float32), scaled, rtol=1e-2)
    np.testing.assert_array_equal(values["odd"], np.asarray(ids) % 2 == 1)


def test_requests_are_joined_by_their_shapes(rows: Any) -> None:
    rng = np.random.default_rng(0)
    given = [(rng.integers(0, 9, (count, length)), rng.random(count, np.float32)) for count, length in
             [(1, 3), (2, 3), (1, 5), (3, 3), (2, 5), (3, 3), (1, 2)]]  # fmt: skip
    responses = rows.execute([request(*item) for item in given])
    assert len(responses) == 7
    for response, item in zip(responses, given, strict=True):
        check(response, *item)
    assert sorted(rows.calls) == [1, 3, 3, 6]  # of eight rows at most: 1 + 2 + 3, then 3; and 1 + 2; and 1


def test_the_outputs_that_are_asked_for(rows: Any) -> None:
    (response,) = rows.execute([request([[1, 2]], [2], "odd", "scaled")])
    assert set(response.values()) == {"scaled", "odd"}


def test_a_bad_request_does_not_touch_others(rows: Any) -> None:
    good, short = ([[1, 2, 3]], [2]), ([[1]], [2])
    responses = rows.execute([request(*good), request(*short), request(*good, cancelled=True), request(*good)])
    check(responses[0], *good)
    check(responses[3], *good)
    assert responses[1].error().code() == utils.TritonError.INVALID_ARG
    assert "dimension 1 (s27) must be from 2 to 32" in responses[1].error().message() or "must be from 2 to 32" in (
        responses[1].error().message()
    )
    assert responses[2].error().code() == utils.TritonError.CANCELLED
    assert responses[2].error().message() == "the request was cancelled"
    # In one call with others it is the same: rows that do not agree with the other input's.
    responses = rows.execute([request([[1, 2, 3]], [2]), request([[1, 2, 3]], [2, 3])])
    check(responses[0], [[1, 2, 3]], [2])
    assert responses[1].error().code() == utils.TritonError.INVALID_ARG


def test_a_missing_input(rows: Any) -> None:
    missing = utils.InferenceRequest([utils.Tensor("ids", np.ones((1, 2), np.int64))])
    (response,) = rows.execute([missing])
    assert response.error().message() == "method 'rows': the input 'scale' is missing"


def test_other_failures_are_internal(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(inputs: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(rows._method, "run", fails)
    responses = rows.execute([request([[1, 2]], [2]), request([[1, 2]], [2])])
    assert [response.error().code() for response in responses] == [utils.TritonError.INTERNAL] * 2
    assert responses[0].error().message() == "ZeroDivisionError: by zero"


def test_without_batching_each_request_is_a_call(repository: pathlib.Path) -> None:
    model = load_model(repository / "m_rows")
    model.initialize(arguments(repository / "m_rows", lambda config: config.pop("max_batch_size")))
    good = ([[1, 2, 3]], [2])
    for response in model.execute([request(*good), request(*good)]):
        check(response, *good)
    assert model._batch is None
    model.finalize()


def test_bfloat16_in_and_out(repository: pathlib.Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    model = load_model(repository / "m_half")
    model.initialize(arguments(repository / "m_half"))
    x = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    requests = [utils.InferenceRequest([utils.Tensor.of_bfloat16("x", x)]) for _ in range(2)]
    for response in model.execute(requests):
        assert not response.has_error(), response.error().message()
        np.testing.assert_array_equal(response.values()["output"], 2 * x)
    model.finalize()


def test_the_only_method_needs_no_name(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write_repository(own_package, tmp_path, method="linear", name="m")
    model = load_model(tmp_path / "m_linear")
    with pytest.raises(utils.TritonModelException, match="^model 'm_linear': .* has no method 'nope'"):
        model.initialize(
            arguments(tmp_path / "m_linear", lambda c: c["parameters"].update(method={"string_value": "nope"}))
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c["parameters"].update(num_thread={"string_value": "1"}),
         "config.pbtxt: expected the parameters method, device, .*, got 'num_thread': did you mean 'num_threads'"),
        (lambda c: c["parameters"].update(num_threads={"string_value": "many"}), "num_threads: expected an integer .* 'many'"),
        (lambda c: c["input"].pop(), "config.pbtxt: input: expected ids, scale, got ids"),
        (lambda c: c["output"].pop(), "config.pbtxt: output: expected half, odd, scaled, total, got half, scaled, total"),
    ],
)  # fmt: skip
def test_a_wrong_config_fails_the_load(repository: pathlib.Path, change: Any, text: str) -> None:
    model = load_model(repository / "m_rows")
    with pytest.raises(utils.TritonModelException, match=f"^model 'm_rows': .*{text}"):
        model.initialize(arguments(repository / "m_rows", change))


def test_parameters_of_the_server_are_its_own(repository: pathlib.Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["parameters"]["EXECUTION_ENV_PATH"] = {"string_value": "/opt/env"}
        config["parameters"]["tf32"] = {"string_value": "false"}

    model = load_model(repository / "m_rows")
    model.initialize(arguments(repository / "m_rows", change))
    model.finalize()


def test_a_gpu_instance_names_its_gpu(repository: pathlib.Path) -> None:
    model = load_model(repository / "m_rows")
    given = arguments(repository / "m_rows") | {"model_instance_kind": "GPU", "model_instance_device_id": "3"}
    with pytest.raises(utils.TritonModelException, match="cuda:3"):
        model.initialize(given)


def test_no_torch(repository: pathlib.Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(repository / 'm_rows' / '1')!r}); import model; print(model.TritonPythonModel.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "TritonPythonModel\n"
