"""The protocol over HTTP, by http.client: JSON, binary tensors, health, metadata, errors."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import zlib
from typing import Any

import numpy as np
import pytest

from tests.serve.process import RUN_PYTHON, Server, linear, serve

X = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
TENSOR = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": X}


def values(document: Any, index: int = 0) -> Any:
    output = document["outputs"][index]
    return np.array(output["data"]).reshape(output["shape"]).tolist()


def test_the_server_has_no_torch(server: Server) -> None:
    maps = pathlib.Path(f"/proc/{server.pid}/maps").read_text()
    assert "libuntorch" in maps
    assert not re.search(r"libtorch|/torch/lib", maps)
    assert RUN_PYTHON


def test_health_and_metadata(server: Server) -> None:
    assert server.json("GET", "/v2/health/live") == (200, {"live": True})
    assert server.json("GET", "/v2/health/ready") == (200, {"ready": True})
    assert server.json("GET", "/v2/models/own.linear/ready") == (200, {"name": "own.linear", "ready": True})
    status, document = server.json("GET", "/v2")
    assert (status, document["name"]) == (200, "untorch")
    assert "binary_tensor_data" in document["extensions"]
    status, document = server.json("GET", "/v2/models/own.linear/versions/1")
    assert status == 200
    assert document == {
        "name": "own.linear",
        "versions": ["1"],
        "platform": "untorch_pt2",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
        "untorch": {"method": "linear", "device": "cpu", "batching": {"joined": True}},
    }
    _, document = server.json("GET", "/v2/models/own.counter")
    assert document["untorch"]["batching"] == {"joined": False, "reason": "the method changes buffers"}
    _, document = server.json("GET", "/v2/models/served.similarity")
    assert document["untorch"]["batching"]["reason"].endswith(" is also another dimension of output 'output'")
    _, document = server.json("GET", "/v2/models/served.centre")
    assert document["untorch"]["batching"]["reason"] == "rows give other results together than alone"
    _, document = server.json("GET", "/v2/models/served")
    assert (document["name"], document["untorch"]["method"]) == ("served", "forward")
    assert document["untorch"]["batching"]["joined"]
    _, document = server.json("GET", "/v2/models/own.alias")
    assert document["untorch"]["batching"]["reason"] == "dimension 0 of input 'x' is not dynamic"


def test_json(server: Server) -> None:
    status, document = server.infer("own.linear", X, id="seven")
    assert (status, document["id"], document["model_name"]) == (200, "seven", "own.linear")
    assert values(document) == linear(X)
    flat = {**TENSOR, "data": [1, 2, 3, 4, 5, 6, 7, 8]}
    status, document = server.json("POST", "/v2/models/own.linear/versions/1/infer", {"inputs": [flat]})
    assert (status, values(document)) == (200, linear(X))


def test_binary_tensors(server: Server) -> None:
    data = np.array(X, dtype=np.float32).tobytes()
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": len(data)}}
            ],
            "outputs": [{"name": "output", "parameters": {"binary_data": True}}],
        }
    ).encode()
    for pad in range(4):  # the tensor may lie at any address
        text = header + b" " * pad
        status, headers, body = server.request(
            "POST", "/v2/models/own.linear/infer", text + data, {"Inference-Header-Content-Length": str(len(text))}
        )
        assert status == 200, body
        length = int(headers["inference-header-content-length"])
        output = json.loads(body[:length])["outputs"][0]
        assert output == {
            "name": "output",
            "datatype": "FP32",
            "shape": [2, 3],
            "parameters": {"binary_data_size": 24},
        }
        assert np.frombuffer(body[length:], np.float32).reshape(2, 3).tolist() == linear(X)


def test_all_datatypes(server: Server) -> None:
    """The method gives arrays of many dtypes back as they came."""
    _, metadata = server.json("GET", "/v2/models/served.types")
    kinds = [port["datatype"] for port in metadata["inputs"]]
    assert kinds == ["FP32", "FP64", "FP16", "BF16", "INT8", "INT16", "INT32", "INT64", "UINT8", "BOOL"]
    inputs = [
        {**port, "data": [True, False] * 3 if port["datatype"] == "BOOL" else [1, 2, 3, 4, 5, 6]}
        for port in metadata["inputs"]
    ]
    status, document = server.json("POST", "/v2/models/served.types/infer", {"inputs": inputs})
    assert status == 200, document
    for sent, got in zip(inputs, document["outputs"], strict=True):
        assert (got["datatype"], got["shape"], got["data"]) == (sent["datatype"], [2, 3], sent["data"])
    for kind, wrong in (("INT8", 128), ("UINT8", -1), ("INT32", 1.5), ("BOOL", 1), ("FP64", 10**400)):
        bad = [{**item, "data": [wrong] * 6} if item["datatype"] == kind else item for item in inputs]
        status, document = server.json("POST", "/v2/models/served.types/infer", {"inputs": bad})
        assert (status, "data: " in document["error"]) == (400, True), document


def test_a_dtype_that_the_protocol_lacks(server: Server) -> None:
    _, metadata = server.json("GET", "/v2/models/own.types")
    assert "COMPLEX64" in {port["datatype"] for port in metadata["inputs"]}  # no client can send it
    inputs = [
        {**port, "data": [True, False] * 3 if port["datatype"] == "BOOL" else [1, 2, 3, 4, 5, 6]}
        for port in metadata["inputs"]
    ]
    status, document = server.json("POST", "/v2/models/own.types/infer", {"inputs": inputs})
    assert status == 400
    assert document["error"].startswith("input 'tensors[10]': datatype: expected one of BOOL, UINT8,")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_requests(server: Server, encoding: str) -> None:
    body = json.dumps({"inputs": [TENSOR]}).encode()
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    path = "/v2/models/own.linear/infer"
    status, document = server.json("POST", path, packed, {"Content-Encoding": encoding})
    assert (status, values(document)) == (200, linear(X))
    bomb = gzip.compress(b" " * 50_000_000) if encoding == "gzip" else zlib.compress(b" " * 50_000_000)
    status, document = server.json("POST", path, bomb, {"Content-Encoding": encoding})
    assert status == 413
    status, document = server.json("POST", path, packed[:-5], {"Content-Encoding": encoding})
    assert status == 400
    assert "the body ends too early" in document["error"]


def test_calls_start_from_the_buffers_in_the_file(server: Server) -> None:
    """No client sees what another one's call left."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [4], "data": [0, 0, 0, 0]}
    answers = [server.json("POST", "/v2/models/own.counter/infer", {"inputs": [tensor]}) for _ in range(3)]
    assert [values(document) for _, document in answers] == [[1.0, 1.5, 1.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("own.nope", {"inputs": []}, 404, "no model is named 'own.nope', there are: own.alias,"),
        ("own", {"inputs": []}, 404, "package 'own' has several methods, call one of: own.alias,"),
        ("own.linear/versions/2", {"inputs": []}, 404, "model 'own.linear' has the version 1, not '2'"),
        ("own.linear", b"", 400, "the request is no JSON: Expecting value"),
        ("own.linear", b"[" * 100_000, 400, "the request is no JSON: it is nested too deeply"),
        ("own.linear", b"[]", 400, "the request: expected a JSON object, got list"),
        ("own.linear", {}, 400, "inputs: expected a list of tensors, got none"),
        ("own.linear", {"inputs": 1}, 400, "inputs: expected a list, got 1"),
        ("own.linear", {"inputs": [{}]}, 400, "inputs: expected objects with a name, got {}"),
        ("own.linear", {"inputs": [TENSOR, TENSOR]}, 400, "inputs: 'x' is given twice"),
        ("own.linear", {"inputs": []}, 400, "model 'own.linear': expected the inputs x, got none"),
        ("own.linear", {"inputs": [{**TENSOR, "shape": [2, -4]}]}, 400, "input 'x': shape: expected a list of sizes"),
        ("own.linear", {"inputs": [{**TENSOR, "shape": [1 << 40, 1 << 40]}]}, 400, "input 'x': shape: expected fewer"),
        ("own.linear", {"inputs": [{**TENSOR, "datatype": "FP8"}]}, 400, "input 'x': datatype: expected one of BOOL"),
        ("own.linear", {"inputs": [{**TENSOR, "data": ["a"] * 8}]}, 400, "input 'x': data: expected numbers for FP32"),
        ("own.linear", {"inputs": [{**TENSOR, "datatype": "INT64", "data": [1] * 8}]}, 400, "model 'own.linear': input 'x': expected FP32[-1, 4], got INT64[2, 4]"),
        ("own.linear", {"inputs": [{**TENSOR, "shape": [4, 2]}]}, 400, "input 'x': data: expected one list of 8 elements"),
        ("own.linear", {"inputs": [{**TENSOR, "shape": [4, 2], "data": [1] * 8}]}, 400, "method 'linear', input 'x': expected"),
        ("own.linear", {"inputs": [{**TENSOR, "shape": [100, 4], "data": [0] * 400}]}, 400, "method 'linear'"),
        ("own.linear", {"inputs": [TENSOR], "outputs": [{"name": "y"}]}, 400, "model 'own.linear': unknown output 'y', there are: output"),
        ("own.linear", {"inputs": [TENSOR], "parameters": {"sequence_id": 3}}, 400, "parameter 'sequence_id': sequences are not served"),
        ("own.linear", {"inputs": [{**TENSOR, "parameters": {"shared_memory_region": "a"}}]}, 400, "input 'x': parameter 'shared_memory_region': shared memory is not served"),
        ("own.linear", {"inputs": [{**TENSOR, "parameters": {"binary_data_size": 32}}]}, 400, "input 'x': binary_data_size: expected at most the 0 bytes"),
        ("own.linear", {"inputs": [TENSOR], "parameters": {"timeout": "soon"}}, 400, "parameter 'timeout': expected microseconds, got 'soon'"),
        ("own.linear", {"inputs": [TENSOR], "parameters": {"timeout": 1}}, 504, "model 'own.linear': the call was not computed within 1e-06 s"),
    ],
)  # fmt: skip
def test_errors(server: Server, path: str, body: Any, status: int, error: str) -> None:
    got, document = server.json("POST", f"/v2/models/{path}/infer", body)
    assert (got, document["error"][: len(error)]) == (status, error)
    assert list(document) == ["error"]
    assert server.infer("own.linear", X)[0] == 200


@pytest.mark.parametrize(
    ("length", "error"),
    [
        ("x", "Inference-Header-Content-Length: expected at most"),
        ("-1", "Inference-Header-Content-Length: expected at most"),
        ("9" * 30, "Inference-Header-Content-Length: expected at most"),
        ("3", "the request is no JSON"),
    ],
)
def test_a_wrong_header_length(server: Server, length: str, error: str) -> None:
    body = json.dumps({"inputs": [TENSOR]}).encode()
    headers = {"Inference-Header-Content-Length": length}
    status, document = server.json("POST", "/v2/models/own.linear/infer", body, headers)
    assert (status, document["error"][: len(error)]) == (400, error)


def test_bytes_that_belong_to_nothing(server: Server) -> None:
    body = json.dumps({"inputs": [TENSOR]}).encode()
    status, document = server.json(
        "POST", "/v2/models/own.linear/infer", body + b"12345", {"Inference-Header-Content-Length": str(len(body))}
    )
    assert status == 400
    assert document["error"].startswith("5 bytes behind the JSON header belong to no input")


def test_other_paths_and_methods(server: Server) -> None:
    assert server.json("GET", "/v2/nothing") == (404, {"error": "Not Found"})
    assert server.json("GET", "/v2/models/own.linear/infer")[0] == 405


def test_request_ids(server: Server) -> None:
    _, headers, _ = server.request("GET", "/v2", headers={"X-Request-Id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"
    _, headers, _ = server.request("GET", "/v2", headers={"X-Request-Id": "a b\tc"})
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])


def test_metrics(server: Server) -> None:
    server.infer("own.linear", X)
    server.infer("own.nope", X)
    status, headers, body = server.request("GET", "/metrics")
    text = body.decode()
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert re.search(r'untorch_requests_total\{code="ok",model="own.linear",protocol="http"\} [1-9]', text)
    assert re.search(r'untorch_requests_total\{code="not_found",model="unknown",protocol="http"\} [1-9]', text)
    assert re.search(r'untorch_batch_rows_sum\{model="own.linear"\} [1-9]', text)
    assert re.search(r'untorch_http_requests_total\{code="200",method="POST",route="/v2/models/\{name\}/infer"\}', text)
    assert re.search(r'untorch_memory_bytes\{kind="mapped",package="own"\} [1-9]', text)
    assert "own.nope" not in text  # clients choose no labels


def test_pages_of_other_sites(server: Server) -> None:
    """A browser sends such calls without asking, and tells where the page is from."""
    for origin, status in (("http://evil.example", 403), ("null", 403), (server.addresses["http"], 200)):
        assert server.json("POST", "/v2/repository/index", b"", {"Origin": origin})[0] == status
    _, document = server.json("POST", "/v2/repository/models/own/unload", b"", {"Origin": "http://evil.example"})
    assert document["error"].startswith("Origin: expected a page of this server: name others by --cors-origin")
    assert server.infer("own.linear", X)[0] == 200


def test_keys(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with serve(tmp_path, f"own={package}", "--api-key", "one", "--log-format", "json", UNTORCH_API_KEY="two") as server:
        assert server.json("GET", "/v2/health/ready")[0] == 200
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            status, document = server.json("GET", "/v2", headers=headers)
            assert status == 401
            assert document == {"error": "Authorization: expected 'Bearer KEY' with a key of this server"}
        assert server.request("GET", "/metrics")[0] == 401
        for key in ("one", "two"):
            assert server.json("GET", "/v2", headers={"Authorization": f"Bearer {key}"})[0] == 200
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert {"time", "level", "logger", "message", "process"} <= set(lines[0])
        access = [line for line in lines if line["logger"] == "untorch.serve.access"]
        assert [line["status"] for line in access][:2] == [200, 401]
        assert {"request_id", "method", "path", "seconds", "client"} <= set(access[0])
        assert not re.search("one|two|three", server.log.read_text())
