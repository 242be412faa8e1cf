"""Embeddings and the list of models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.unit.serve.openai.api import serve
from untorch import InvalidArgumentError


@pytest.fixture
def client() -> Iterator[TestClient]:
    with serve() as made:
        engine = made.app.state.engine  # type: ignore[attr-defined]

        def embed(prompts: list[Any]) -> np.ndarray:
            if "refused" in prompts:
                raise InvalidArgumentError(f"embed: prompts[{prompts.index('refused')}]: prompt: too long")
            prompts = [engine.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
            vectors = np.array([[len(p), p[0], 3, 0] for p in prompts], np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

        engine.embed = embed
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


@pytest.mark.parametrize("given", ["ab", [64, 65], [[64, 65]], ["ab"]])
def test_kinds_of_inputs(client: TestClient, given: Any) -> None:
    [one] = post(client, input=given).json()["data"]
    np.testing.assert_allclose(one["embedding"], np.array([2, 64, 3, 0]) / np.sqrt(4 + 4096 + 9), rtol=1e-6)


def test_the_form_for_asyncio_is_preferred(client: TestClient) -> None:
    engine = client.app.state.engine  # type: ignore[attr-defined]

    async def aembed(prompts: list[Any]) -> np.ndarray:
        return np.array([[1, 2]], np.float32)

    engine.aembed = aembed
    assert post(client, input="ab").json()["data"][0]["embedding"] == [1, 2]


def test_fewer_dimensions_have_length_1(client: TestClient) -> None:
    [one] = post(client, input="ab", dimensions=2).json()["data"]
    np.testing.assert_allclose(one["embedding"], np.array([2, 64]) / np.hypot(2, 64), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": "a", "dimensions": 5}, "dimensions", "expected an integer from 1 to 4, the model's width, got 5"),
        ({"input": "a", "dimensions": 0}, "dimensions", "expected an integer of 1 or more, got 0"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", 'expected "float" or "base64", got "hex"'),
        ({"input": ["a", "refused"]}, "input", "input[1]: prompt: too long"),
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
