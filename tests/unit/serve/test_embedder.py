"""Packages of the task text-embedding behind /v1/embeddings: batches, counts, prompts, limits."""

from __future__ import annotations

import asyncio
import base64
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.llm.fake import byte_tokenizer
from tests.unit.serve.openai.api import Models
from untorch import ClosedError, InvalidArgumentError
from untorch.pipeline.settings import Settings
from untorch.pipeline.text import TextEmbedding
from untorch.serve.embedder import Embedder
from untorch.serve.errors import DeadlineError, QueueFullError
from untorch.serve.model import Port
from untorch.serve.openai import Options, routes


class Method:
    """Gives the number, the sum and the first of a row's tokens, which padding must not change."""

    name, platform, timeout = "m", "untorch_pt2", 0.0
    outputs = (Port("output", "FP32", (-1, 3)),)

    def __init__(self, names: list[str], rows: int = -1) -> None:
        self.inputs = tuple(Port(name, "INT64", (rows, -1)) for name in names)
        self.shapes: list[tuple[int, ...]] = []
        self.error: Exception | None = None

    async def infer(self, inputs: Mapping[str, Any], parameters: Mapping[str, Any], timeout: float | None) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        ids = inputs["input_ids"]
        self.shapes.append(ids.shape)
        mask = inputs.get("attention_mask", ids >= 0)
        await asyncio.sleep(0.001)
        return {"output": np.stack([mask.sum(1), (ids * mask).sum(1), ids[:, 0]], 1).astype(np.float16)}

    def describe(self) -> dict[str, Any]:
        return {}


def pipeline(names: list[str], **fields: Any) -> TextEmbedding:
    values = {
        "task": "text-embedding", "architecture": "A", "text_inputs": names, "max_length": 40, "pad_id": 5,
        "padding_side": "right", **fields,
    }  # fmt: skip
    program: Any = types.SimpleNamespace(path="a.pt2")
    program._program = types.SimpleNamespace(entry=lambda name: byte_tokenizer())
    return TextEmbedding(program, Settings(values, "a.pt2"), owned=False)


NAMES = ["input_ids", "attention_mask"]


def serve(method: Method, max_rows: int = 4, options: Options | None = None, **fields: Any) -> TestClient:
    embedder = Embedder(pipeline([port.name for port in method.inputs], **fields), method, max_rows)
    return TestClient(Starlette(routes=list(routes(Models(), options, embedders=Models(m=embedder)))))


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"model": "m", **fields})


def test_a_text_that_is_too_long_to_be_read() -> None:
    answer = post(serve(Method(NAMES)), input=["a", "a" * (2**20 + 1)])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "input[1]: expected at most 1048576 characters, got 1048577"


def test_texts_and_token_ids() -> None:
    method = Method(NAMES)
    client = serve(method)
    texts = ["a" * count for count in (3, 20, 1, 2, 9, 4)]
    found = post(client, input=texts, user="me").json()
    assert [one["embedding"][0] for one in found["data"]] == [3, 20, 1, 2, 9, 4]
    assert [one["index"] for one in found["data"]] == [0, 1, 2, 3, 4, 5]
    assert found["usage"] == {"prompt_tokens": 39, "total_tokens": 39}
    assert sorted(method.shapes) == [(2, 24), (4, 8)]  # the short ones first, in multiples of 8
    found = post(client, input=[7, 8, 9]).json()
    assert found["data"][0]["embedding"] == [3.0, 24.0, 7.0]
    assert post(client, input=[[7], "a"]).json()["usage"]["prompt_tokens"] == 2
    short = post(client, input=[3, 4], encoding_format="base64", dimensions=2).json()["data"][0]["embedding"]
    values = np.frombuffer(base64.b64decode(short), "<f4")
    np.testing.assert_allclose(values, np.array([2, 7]) / np.hypot(2, 7), rtol=1e-6)


def test_rows_are_as_long_as_the_model_reads() -> None:
    method = Method(NAMES)
    client = serve(method)
    assert post(client, input="a" * 40).status_code == 200
    assert method.shapes == [(1, 40)]
    error = post(client, input=["a", "a" * 41]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "expected at most 40 tokens" in error["message"] and "got 41" in error["message"]


def test_without_a_mask_rows_are_not_padded_further() -> None:
    method = Method(["input_ids"])
    client = serve(method)
    post(client, input=["abc"])
    assert method.shapes == [(1, 3)]
    method = Method(NAMES, rows=1)
    post(serve(method), input=["abc", "d"])
    assert method.shapes == [(1, 8), (1, 8)]


def test_prompts_of_the_package() -> None:
    client = serve(Method(NAMES), prompts={"query": "query: "}, default_prompt="query")
    found = post(client, input="ab").json()
    assert found["data"][0]["embedding"][0] == 9
    assert found["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "input[0]: expected at least one token, got none"),
        (["a", []], "input[1]: expected at least one token, got none"),
        ([[3, 10**6]], "input[0]: expected token ids from 0 to 257, got 1000000"),
        ([["a"]], "input[0]: expected token ids from 0 to 257, got 'a'"),
        ([1.5], "input[0]: expected a string, an array of strings, of token ids, or of arrays of token ids, got 1.5"),
        ([], "input: expected at least one, got []"),
        ({"a": 1}, "input: expected a string, an array of strings"),
        (None, "input: "),
    ],
)
def test_wrong_inputs(given: Any, text: str) -> None:
    answer = post(serve(Method(NAMES)), input=given)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(text)


def test_other_endpoints() -> None:
    client = serve(Method(NAMES))
    [listed] = client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("m", 40)
    assert client.get("/v1/models/m").json() == listed
    answer = client.post("/v1/completions", json={"model": "m", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert "use /v1/embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("model 'm': 5 calls wait already"), 429, "rate_limit_exceeded"),
        (DeadlineError("model 'm': the call was not computed within 1 s"), 504, "timeout"),
        (InvalidArgumentError("x"), 400, "invalid_value"),
    ],
)
def test_errors_of_the_method(error: Exception, status: int, code: str) -> None:
    method = Method(NAMES)
    client = serve(method)
    method.error = error
    answer = post(client, input="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert (answer.headers.get("retry-after") == "1") == (status == 429)


def test_a_method_that_is_loaded_again() -> None:
    method = Method(NAMES)
    client = serve(method)
    method.error = ClosedError("model 'm' is unloaded")
    assert post(client, input="a").status_code == 200


def test_more_inputs_than_may_wait() -> None:
    client = serve(Method(NAMES), options=Options(max_requests=2))
    assert post(client, input=["a", "b", "c"]).status_code == 400
    assert post(client, input=["a", "b"]).status_code == 200
