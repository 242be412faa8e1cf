"""tritonclient as it comes, over HTTP and gRPC."""

from __future__ import annotations

import pathlib
import queue
import shutil
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.serve.process import Server, linear, serve

httpclient = pytest.importorskip("tritonclient.http")
grpcclient = pytest.importorskip("tritonclient.grpc")
from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: E402

X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> Any:
    return httpclient if request.param == "http" else grpcclient


@pytest.fixture
def client(module: Any, server: Server) -> Iterator[Any]:
    with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as one:
        yield one


def tensor(module: Any, name: str, array: Any, **how: Any) -> Any:
    one = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    one.set_data_from_numpy(array, **how)
    return one


def test_health_and_metadata(module: Any, client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("own.linear") and client.is_model_ready("own.linear", "1")
    how = {} if module is httpclient else {"as_json": True}
    assert client.get_server_metadata(**how)["name"] == "untorch"
    metadata = client.get_model_metadata("own.linear", **how)
    assert metadata["platform"] == "untorch_pt2"
    assert [(one["name"], one["datatype"], [int(size) for size in one["shape"]]) for one in metadata["inputs"]] == [
        ("x", "FP32", [-1, 4])
    ]


def test_infer(module: Any, client: Any) -> None:
    result = client.infer("own.linear", [tensor(module, "x", X)], request_id="9")
    assert result.as_numpy("output").tolist() == linear(X.tolist())
    response = result.get_response()
    assert (response["id"] if module is httpclient else response.id) == "9"
    outputs = [module.InferRequestedOutput("output")]
    result = client.infer("own.linear", [tensor(module, "x", X)], model_version="1", outputs=outputs, timeout=10**7)
    assert result.as_numpy("output").tolist() == linear(X.tolist())


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_infer_json(server: Server, binary_in: bool, binary_out: bool) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for algorithm in (None, "gzip", "deflate"):
            result = client.infer(
                "own.linear",
                [tensor(httpclient, "x", X, binary_data=binary_in)],
                outputs=[httpclient.InferRequestedOutput("output", binary_data=binary_out)],
                request_compression_algorithm=algorithm,
            )
            assert result.as_numpy("output").tolist() == linear(X.tolist())


def test_all_datatypes(module: Any, client: Any) -> None:
    names = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
    arrays = [
        np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in names
    ]  # fmt: skip
    inputs = [tensor(module, f"tensors[{i}]", array) for i, array in enumerate(arrays)]
    result = client.infer("served.types", inputs)
    how = {} if module is httpclient else {"as_json": True}
    outputs = [one["name"] for one in client.get_model_metadata("served.types", **how)["outputs"]]
    for name, array in zip(outputs, arrays, strict=True):
        got = result.as_numpy(name)
        assert got.astype(float).tolist() == array.astype(float).tolist(), name


def test_a_model_that_relates_rows(module: Any, client: Any) -> None:
    result = client.infer("served.similarity", [tensor(module, "x", X)])
    assert result.as_numpy("output").tolist() == (X @ X.T).tolist()


def test_async(module: Any, client: Any) -> None:
    """Many at a time: each has its own rows."""
    inputs = [np.full((1, 4), i, dtype=np.float32) for i in range(60)]
    if module is httpclient:
        pending = [client.async_infer("own.linear", [tensor(module, "x", x)]) for x in inputs]
        results = [one.get_result() for one in pending]
    else:
        done: queue.Queue[Any] = queue.Queue()
        for i, x in enumerate(inputs):
            client.async_infer(
                "own.linear", [tensor(module, "x", x)], lambda result, error, i=i: done.put((i, result, error))
            )
        found = sorted((done.get(timeout=20) for _ in inputs), key=lambda item: item[0])
        assert all(error is None for _, _, error in found)
        results = [result for _, result, _ in found]
    for x, result in zip(inputs, results, strict=True):
        assert result.as_numpy("output").tolist() == linear(x.tolist())


@pytest.mark.parametrize(
    ("model", "array", "text"),
    [
        ("nope", X, "no model is named 'nope'"),
        ("own.linear", X.astype(np.int32), r"input 'x': expected FP32\[-1, 4\], got INT32\[2, 4\]"),
        ("own.linear", X[:, :3].copy(), "method 'linear', input 'x'"),
        ("own.linear", np.array([[b"a"]], dtype=object), "input 'x': expected numbers, got BYTES"),
    ],
)
def test_errors(module: Any, client: Any, model: str, array: Any, text: str) -> None:
    with pytest.raises(InferenceServerException, match=text) as caught:
        client.infer(model, [tensor(module, "x", array)])
    if module is grpcclient:
        status = "NOT_FOUND" if model == "nope" else "INVALID_ARGUMENT"
        assert caught.value.status() == f"StatusCode.{status}"
    assert client.infer("own.linear", [tensor(module, "x", X)]).as_numpy("output").shape == (2, 3)


def test_extensions_that_are_not_served(module: Any, client: Any) -> None:
    with pytest.raises(InferenceServerException, match="sequences are not served"):
        client.infer("own.linear", [tensor(module, "x", X)], sequence_id=3, sequence_start=True)
    shared = module.InferInput("x", [2, 4], "FP32")
    shared.set_shared_memory("region", 32)
    with pytest.raises(InferenceServerException, match="shared memory is not served"):
        client.infer("own.linear", [shared])
    with pytest.raises(InferenceServerException, match="expected none, as a package is loaded as it is, got config"):
        client.load_model("served", config="{}")
    for call, arguments, what in (
        ("register_system_shared_memory", ("region", "/region", 64), "shared memory"),
        ("get_cuda_shared_memory_status", (), "shared memory"),
        ("unregister_system_shared_memory", (), "shared memory"),
        ("get_trace_settings", (), "trace settings"),
        ("update_trace_settings", ("own.linear",), "trace settings"),
        ("get_log_settings", (), "log settings"),
    ):
        with pytest.raises(
            InferenceServerException, match=f"{what}: not served; the extensions are: binary_tensor_data"
        ):
            getattr(client, call)(*arguments)


def test_grpc_stream(server: Server) -> None:
    """Answers come in order; one that fails does not end the stream."""
    done: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: done.put((result, error)))
        for i in range(5):
            model = "nope" if i == 2 else "own.linear"
            x = np.full((1, 4), i, dtype=np.float32)
            client.async_stream_infer(model, [tensor(grpcclient, "x", x)], request_id=str(i))
        answers = [done.get(timeout=20) for _ in range(5)]
        client.stop_stream()
    for i, (result, error) in enumerate(answers):
        if i == 2:
            assert "no model is named 'nope'" in str(error)
        else:
            assert result.as_numpy("output").tolist() == linear([[i] * 4])


def test_grpc_typed_contents(server: Server) -> None:
    """Values in the fields of InferTensorContents, which tritonclient itself does not send."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="own.linear")
        one = request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
        one.contents.fp32_contents.extend(X.ravel().tolist())
        response = stub.ModelInfer(request)
        assert np.frombuffer(response.raw_output_contents[0], np.float32).reshape(2, 3).tolist() == linear(X.tolist())
        del one.contents.fp32_contents[-1]
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.details() == "input 'x': fp32_contents: expected 8 elements as the shape says, got 7"
        one.datatype = "BF16"
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.details() == "input 'x': contents: BF16 has no field there: use raw_input_contents"
        request.raw_input_contents.extend([b"", b""])
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.details() == "raw_input_contents: expected 1 entries, one an input, got 2"


def test_grpc_nonsense(server: Server) -> None:
    """Bytes that are no message, calls that do not exist, messages that are too large."""
    import grpc

    with grpc.insecure_channel(server.grpc) as channel:
        for method, data, code in (
            ("ModelInfer", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            ("ModelInfer", b"\x0a\x82\x80\x10" + b"m" * (2 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ("Nothing", b"", grpc.StatusCode.UNIMPLEMENTED),
            ("TraceSetting", b"", grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=20)
            assert caught.value.code() == code, (method, caught.value.details())
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.infer("own.linear", [tensor(grpcclient, "x", X)]).as_numpy("output").shape == (2, 3)


def test_configuration(module: Any, client: Any) -> None:
    how = {} if module is httpclient else {"as_json": True}
    found = client.get_model_config("own.linear", **how)
    found = found if module is httpclient else found["config"]
    assert (found["name"], found["platform"], found["max_batch_size"]) == ("own.linear", "untorch_pt2", 32)
    [given], [output] = found["input"], found["output"]
    assert (given["name"], given["data_type"] in ("TYPE_FP32", 11)) == ("x", True)
    assert ([int(size) for size in given["dims"]], [int(size) for size in output["dims"]]) == ([4], [3])
    whole = client.get_model_config("served.similarity", **how)  # calls are not joined
    whole = whole if module is httpclient else whole["config"]
    assert whole.get("max_batch_size", 0) == 0
    assert [int(size) for size in whole["input"][0]["dims"]] == [-1, 4]
    with pytest.raises(InferenceServerException, match="no model is named 'none'"):
        client.get_model_config("none", **how)


def test_statistics(module: Any, client: Any) -> None:
    how = {} if module is httpclient else {"as_json": True}

    def read(name: str = "own.linear") -> dict[str, Any]:
        rows = client.get_inference_statistics(name, **how)["model_stats"]
        return next(row for row in rows if row["name"] == "own.linear")

    def count(row: dict[str, Any], *path: str) -> int:
        value: Any = row
        for part in path:
            value = value.get(part, 0 if part == path[-1] else {})
        return int(value)

    before = read()
    for _ in range(3):
        client.infer("own.linear", [tensor(module, "x", X)])
    with pytest.raises(InferenceServerException, match="expected FP32"):
        client.infer("own.linear", [tensor(module, "x", X.astype(np.float64))])
    after = read("")
    assert count(after, "inference_count") - count(before, "inference_count") == 6  # two rows a call
    assert count(after, "execution_count") - count(before, "execution_count") == 3
    for name, calls in (("success", 3), ("fail", 1), ("queue", 3), ("compute_infer", 3), ("compute_output", 3)):
        path = ("inference_stats", name, "count")
        assert count(after, *path) - count(before, *path) == calls, name
    path = ("inference_stats", "compute_infer", "ns")
    assert count(after, *path) > count(before, *path)
    assert count(after, "last_inference") >= count(before, "last_inference")
    assert "2" in [str(row["batch_size"]) for row in after["batch_stats"]]
    with pytest.raises(InferenceServerException, match="no model is named 'none'"):
        read("none")


def test_load_and_unload(module: Any, package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copy(package, repository / "a.pt2")
    with (
        serve(tmp_path, "--repository", repository) as server,
        module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client,
    ):
        how = {} if module is httpclient else {"as_json": True}

        def index() -> dict[str, str]:
            rows = client.get_model_repository_index(**how)
            return {row["name"]: row["state"] for row in (rows if module is httpclient else rows["models"])}

        assert index()["a.linear"] == "READY"
        shutil.copy(package, repository / "b.pt2")
        assert index()["b"] == "UNAVAILABLE"
        assert not client.is_model_ready("b")
        client.load_model("b")
        assert client.is_model_ready("b") and client.is_model_ready("b.linear")
        assert client.infer("b.linear", [tensor(module, "x", X)]).as_numpy("output").tolist() == linear(X.tolist())
        client.unload_model("a")
        assert index()["a"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="no model is named 'a.linear'"):
            client.infer("a.linear", [tensor(module, "x", X)])
        with pytest.raises(InferenceServerException, match="no package is named 'c'"):
            client.load_model("c")
        with pytest.raises(InferenceServerException, match="no package is named|Not Found"):
            client.load_model("../a")
        (repository / "bad.pt2").write_bytes(b"no package")
        with pytest.raises(InferenceServerException, match="bad.pt2"):
            client.load_model("bad")
        assert client.infer("b.linear", [tensor(module, "x", X)]).as_numpy("output") is not None


def test_keys(module: Any, package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with (
        serve(tmp_path, f"own={package}", UNTORCH_API_KEY="secret") as server,
        module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client,
    ):
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="expected 'Bearer KEY' with a key of this server"):
            client.infer("own.linear", [tensor(module, "x", X)])
        name = "Authorization" if module is httpclient else "authorization"
        result = client.infer("own.linear", [tensor(module, "x", X)], headers={name: "Bearer secret"})
        assert result.as_numpy("output").tolist() == linear(X.tolist())
