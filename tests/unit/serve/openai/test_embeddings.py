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
    with serve(task="embed", width=4) as made:
        engine = made.app.state.engine  # type: ignore[attr-defined]

        async def aembed(prompts: list[Any], timeout: float | None) -> np.ndarray:
            if "refused" in prompts:
                raise InvalidArgumentError(f"embed: prompts[{prompts.index('refused')}]: prompt: too long")
            prompts = [engine.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
            vectors = np.array([[len(p), p[0], 3, 0] for p in prompts], np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

        engine.aembed = aembed
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


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("generate", "it has no embeddings, it generates text"),
        ("classify", "it generates no text and makes no embeddings, but scores: use the Open Inference Protocol"),
    ],
)
def test_models_without_embeddings(task: str, text: str) -> None:
    with serve(task=task, width=4) as client:
        answer = post(client, input="a")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"model: {text}")


def test_a_model_that_generates_no_text(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "m", "prompt": "a"})
    text = "model: it generates no text, it makes embeddings: use /v1/embeddings"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)


def test_the_engines_own_embeddings() -> None:
    """What the fake model says of the last token, with length 1."""
    with serve("Hi", task="embed", width=258, normalize=True) as client:
        [one] = post(client, input="ab").json()["data"]
    assert np.linalg.norm(one["embedding"]) == pytest.approx(1)


def test_models(client: TestClient) -> None:
    found = client.get("/v1/models").json()
    assert found["object"] == "list"
    [one] = found["data"]
    assert (one["id"], one["object"], one["max_model_len"]) == ("m", "model", 1000)
    assert client.get("/v1/models/m").json() == one
