"""Embeddings and the list of models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.unit.serve.openai.api import serve


@pytest.fixture
def client() -> Iterator[TestClient]:
    with serve() as made:

        def embed(prompts: list[list[int]]) -> np.ndarray:
            vectors = np.array([[len(p), p[0], 3, 0] for p in prompts], np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

        made.app.state.engine.embed = embed  # type: ignore[attr-defined]
        yield made


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"model": "m", **fields})


def test_embeddings(client: TestClient) -> None:
    found = post(client, input=["ab", [1, 2, 3]], user="me").json()
    assert found["object"] == "list" and found["model"] == "m"
    assert [(one["object"], one["index"]) for one in found["data"]] == [("embedding", 0), ("embedding", 1)]
    expected = np.array([[2, 64, 3, 0], [3, 1, 3, 0]], np.float32)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose([one["embedding"] for one in found["data"]], expected, rtol=1e-6)
    assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    encoded = post(client, input=["ab", [1, 2, 3]], encoding_format="base64").json()["data"]
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in encoded]
    np.testing.assert_array_equal(decoded, np.array([one["embedding"] for one in found["data"]], np.float32))


def test_fewer_dimensions_have_length_1(client: TestClient) -> None:
    [one] = post(client, input="ab", dimensions=2).json()["data"]
    np.testing.assert_allclose(one["embedding"], np.array([2, 64]) / np.hypot(2, 64), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": "a", "dimensions": 5}, "dimensions", "expected an integer from 1 to 4, the model's width, got 5"),
        ({"input": "a", "dimensions": 0}, "dimensions", "expected an integer of 1 or more, got 0"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", 'expected "float" or "base64", got "hex"'),
        ({}, "input", "required, and missing"),
        ({"input": "x" * 1000}, "input", "expected at most 999 tokens"),
        ({"input": "a", "prompt": "b"}, "prompt", "unknown parameter"),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, Any], param: str, text: str) -> None:
    answer = post(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert text in answer.json()["error"]["message"]


def test_a_model_without_embeddings(client: TestClient) -> None:
    client.app.state.engine.embed = None  # type: ignore[attr-defined]
    answer = post(client, input="a")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "model: it has no embeddings")


def test_models(client: TestClient) -> None:
    found = client.get("/v1/models").json()
    assert found["object"] == "list"
    [one] = found["data"]
    assert (one["id"], one["object"], one["max_model_len"]) == ("m", "model", 1000)
    assert client.get("/v1/models/m").json() == one
