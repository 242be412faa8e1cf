"""Headers of calls over HTTP: those that came before give what they gave, and what differs is read."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest

from untorch import InvalidArgumentError
from untorch.serve.inference import http_header
from untorch.serve.inference.binary import Reader
from untorch.serve.inference.http_header import encode_response, parse_header
from untorch.serve.inference.infer import InferResponse

X = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}


@pytest.fixture(autouse=True)
def _forget() -> None:
    http_header._parse_or_find.cache_clear()
    http_header._write_or_find.cache_clear()


def request(**fields: Any) -> bytes:
    return json.dumps({"inputs": [X], **fields}).encode()


def reader(*values: float) -> Reader:
    return Reader(memoryview(numpy.array(values, numpy.float32).tobytes()))


def test_the_same_header_with_other_bytes() -> None:
    first = parse_header(request(), True)
    again = parse_header(memoryview(request()), True)
    assert again is first
    assert first.read(reader(1, 2))["x"].tolist() == [1, 2]
    assert again.read(reader(3, 4))["x"].tolist() == [3, 4]
    with pytest.raises(InvalidArgumentError, match="at most the 4 bytes that are left"):
        again.read(reader(5))
    with pytest.raises(InvalidArgumentError, match="4 bytes behind the JSON header belong to no input"):
        again.read(reader(1, 2, 3))


def test_all_that_a_header_says() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]
    found = parse_header(request(id="7", outputs=outputs, parameters={"timeout": 5}), True)
    assert (found.id, found.outputs, found.binary, found.parameters) == ("7", ("a", "b"), {"a": True}, {"timeout": 5})


def test_what_is_not_kept() -> None:
    """Whole bodies, which hold the data of clients, and long headers."""
    parse_header(request(), False)
    parse_header(request(parameters={"note": "-" * 5000}), True)
    assert http_header._parse_or_find.cache_info().currsize == 0
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="'x' is given twice"):
            parse_header(json.dumps({"inputs": [X, X]}).encode(), True)


def test_no_more_than_some_are_kept() -> None:
    for i in range(1000):
        parse_header(request(id=str(i)), True)
    assert http_header._parse_or_find.cache_info().currsize == 256


def response(identifier: str = "", **outputs: Any) -> InferResponse:
    return InferResponse("m", "1", identifier, {name: numpy.asarray(value) for name, value in outputs.items()})


def test_responses() -> None:
    all_binary = parse_header(request(parameters={"binary_data_output": True}), True)
    head, parts = encode_response(response(y=numpy.float32([1, 2])), all_binary)
    again, other = encode_response(response(y=numpy.float32([3, 4])), all_binary)
    assert again is head
    assert [numpy.frombuffer(part, numpy.float32).tolist() for part in (*parts, *other)] == [[1, 2], [3, 4]]
    assert json.loads(head) == {
        "model_name": "m", "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
    }  # fmt: skip
    longer, _ = encode_response(response(y=numpy.float32([1, 2, 3])), all_binary)
    assert json.loads(longer)["outputs"][0]["shape"] == [3]
    integers, _ = encode_response(response(y=numpy.int32([1, 2])), all_binary)
    assert json.loads(integers)["outputs"][0]["datatype"] == "INT32"
    named, _ = encode_response(response("7", y=numpy.float32([1, 2])), all_binary)
    assert json.loads(named)["id"] == "7"


def test_a_response_in_both_forms() -> None:
    header = parse_header(request(outputs=[{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]), True)
    head, parts = encode_response(response(a=numpy.uint8([7]), b=numpy.int64([1, 2])), header)
    assert parts == [b"\x07"]
    first, second = json.loads(head)["outputs"]
    assert (first["parameters"], "data" in first) == ({"binary_data_size": 1}, False)
    assert (second["data"], "parameters" in second) == ([1, 2], False)
