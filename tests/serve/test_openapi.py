"""/openapi.json of real servers: every path answers, and answers are what the document says."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

import pytest

from tests.serve.process import Server

KINDS: dict[str, Any] = {
    "string": str, "object": dict, "array": list, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def check(value: Any, schema: dict[str, Any], document: dict[str, Any], where: str = "$") -> None:
    """What these schemas use of JSON Schema."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    kinds = schema.get("type", [])
    if kinds:
        assert isinstance(value, tuple(KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))), where
    assert value in schema.get("enum", [value]) and value == schema.get("const", value), where
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= value.keys(), (where, value)
        for name, one in schema.get("properties", {}).items():
            if name in value:
                check(value[name], one, document, f"{where}.{name}")
        if schema.get("additionalProperties") is False or "properties" in schema:
            assert value.keys() <= schema["properties"].keys(), (where, value)
    if isinstance(value, list):
        for at, one in enumerate(value):
            check(one, schema.get("items", {}), document, f"{where}[{at}]")


def describe(server: Server) -> dict[str, Any]:
    status, document = server.json("GET", "/openapi.json")
    assert status == 200
    found: dict[str, Any] = document
    return found


def check_all(server: Server, document: dict[str, Any]) -> int:
    """Calls every operation that changes nothing, without a body."""
    count = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/v2/repository/models"):
                continue
            for one in operation.get("parameters", []):
                if one["in"] == "path":
                    value = one["schema"].get("const") or one["schema"]["enum"][0]
                    path = path.replace("{" + one["name"] + "}", urllib.parse.quote(value))
            status, headers, body = server.request(method.upper(), path)
            assert status != 404, (method, path)
            response = operation["responses"].get(str(status), operation["responses"]["default"])
            kind = headers["content-type"].partition(";")[0]
            schema = response["content"][kind]["schema"]
            check(json.loads(body) if kind == "application/json" else body.decode(), schema, document, path)
            count += 1
    return count


def test_a_server_of_tensors(server: Server) -> None:
    document = describe(server)
    assert check_all(server, document) >= 15
    names = document["paths"]["/v2/models/{name}/infer"]["post"]["parameters"][0]["schema"]["enum"]
    assert {"own.linear", "served"} <= set(names)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [[1, 2, 3, 4]]}
    request = {"id": "a", "inputs": [tensor], "outputs": [{"name": "output"}], "parameters": {"timeout": 10**7}}
    check(request, {"$ref": "#/components/schemas/InferRequest"}, document)
    status, answer = server.json("POST", "/v2/models/own.linear/infer", request)
    assert status == 200
    check(answer, {"$ref": "#/components/schemas/InferResponse"}, document)
    with pytest.raises(AssertionError):
        check({**request, "inputs": [{**tensor, "datatype": "FP33"}]}, {"$ref": "#/c/InferRequest"}, document)


def test_a_server_of_front_ends(front_ends: Server) -> None:
    document = describe(front_ends)
    assert {"get", "post"} == document["paths"]["/v1/pipeline/colours"].keys()
    assert "/v1/chat/completions" not in document["paths"]
    assert check_all(front_ends, document) >= 15


def test_a_model_of_the_specification(server: Server) -> None:
    models = pytest.importorskip("fastapi.openapi.models")
    made = models.OpenAPI.model_validate(describe(server))
    assert made.openapi == "3.1.0" and "/v2/models/{name}/infer" in made.paths
