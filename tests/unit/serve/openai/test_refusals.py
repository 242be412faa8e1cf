"""What the API refuses: status, the parameter's name, and the text, in OpenAI's envelope."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from tests.unit.serve.openai.api import TOOLS_TEMPLATE, Models, ScriptRunner, serve
from untorch import ClosedError, InvalidArgumentError, ModelError, OutOfMemoryError, UnsupportedError
from untorch.llm import Engine
from untorch.serve.openai import Options, parameters, routes
from untorch.serve.openai.errors import from_exception

USER = {"role": "user", "content": "hi"}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with serve(template=TOOLS_TEMPLATE) as made:
        yield made


def error(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    found: dict[str, Any] = body["error"]
    return found


CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 3}, "temperature", "expected a number from 0 to 2, got 3"),
    ({"temperature": "hot"}, "temperature", 'expected a number from 0 to 2, got "hot"'),
    ({"temperature": True}, "temperature", "expected a number from 0 to 2, got true"),
    ({"top_p": 0}, "top_p", "expected a number above 0, to 1, got 0"),
    ({"top_p": 1.5}, "top_p", "expected a number above 0, to 1, got 1.5"),
    ({"min_p": -0.1}, "min_p", "expected a number from 0 to 1, got -0.1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "expected a number from -2 to 2, got 2.1"),
    ({"frequency_penalty": int("9" * 400)}, "frequency_penalty", "expected a number from -2 to 2, got 999"),
    ({"repetition_penalty": 0}, "repetition_penalty", "expected a number above 0, got 0"),
    ({"repetition_penalty": int("9" * 400)}, "repetition_penalty", "expected a number above 0, got 999"),
    ({"n": 0}, "n", "expected an integer from 1 to 128, got 0"),
    ({"n": 2.0}, "n", "expected an integer from 1 to 128, got 2.0"),
    ({"n": 9}, "n", "expected at most the engine's max_sequences (8), got 9"),
    ({"top_k": -2}, "top_k", "expected an integer of -1 or more, got -2"),
    ({"seed": 1 << 64}, "seed", f"expected an integer from {-(1 << 63)} to {(1 << 64) - 1}, got {1 << 64}"),
    ({"max_tokens": 0}, "max_tokens", f"expected an integer from 1 to {1 << 40}, got 0"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "expected the same as max_tokens (3), got 4"),
    ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "expected at most max_tokens (3), got 4"),
    ({"stop": ""}, "stop", 'expected strings that are not empty, got ""'),
    ({"stop": [1]}, "stop", "expected a string or an array of strings, got [1]"),
    ({"stop": ["a"] * 65}, "stop", "expected at most 64 strings, got 65"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "expected at most 1024 tokens, got 1025"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "expected a list of token ids"),
    ({"stop_token_ids": [999]}, "stop_token_ids", "expected ids from 0 to 257, got 999"),
    ({"logit_bias": [1]}, "logit_bias", "expected an object, got [1]"),
    ({"logit_bias": {"x": 1}}, "logit_bias", 'expected an object of numbers by token id, got "x"'),
    ({"logit_bias": {"3": 101}}, "logit_bias.3", "expected a number from -100 to 100, got 101"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "expected ids from 0 to 257, got 999"),
    ({"logprobs": 3}, "logprobs", "expected true or false, got 3"),
    ({"top_logprobs": 3}, "top_logprobs", "expected logprobs to be true with it"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected an integer from 0 to 20, got 21"),
    ({"stream": "yes"}, "stream", 'expected true or false, got "yes"'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "expected stream to be true with it"),
    ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "unknown parameter: did you mean include_usage?"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
        "not served: chunks are not padded",
    ),
    ({"priority": "high"}, "priority", "expected an integer from"),
    ({"temprature": 1}, "temprature", "unknown parameter: did you mean temperature?"),
    ({"anything": 1}, "anything", "unknown parameter"),
    # Of the API, and not served.
    ({"store": True}, "store", "not served: nothing is stored"),
    ({"service_tier": "flex"}, "service_tier", "not served: there is one tier"),
    ({"modalities": ["text", "audio"]}, "modalities", "not served: the answer is text"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio", "not served: the answer is text"),
    ({"verbosity": "low"}, "verbosity", "not served"),
    ({"functions": [{}]}, "functions", "not served: use tools"),
    ({"function_call": "auto"}, "function_call", "not served: use tool_choice"),
    ({"web_search_options": {}}, "web_search_options", "not served"),
    ({"moderation": {"model": "x"}}, "moderation", "not served"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not served: the model's chat template has no such setting"),
    ({"reasoning_effort": "much"}, "reasoning_effort", 'expected "none" or "minimal" or'),
    # Messages.
    ({"messages": None}, "messages", "required, and missing"),
    ({"messages": []}, "messages", "expected at least one message, got []"),
    ({"messages": "hi"}, "messages", 'expected an array, got "hi"'),
    ({"messages": ["hi"]}, "messages[0]", 'expected an object, got "hi"'),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required, and missing"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "expected system, developer, user, assistant or tool"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "expected system"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "not served: use role tool"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "required, and missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "expected a string or an array of text parts, got 3"),
    ({"messages": [{**USER, "contents": "x"}]}, "messages[0].contents", "unknown parameter: did you mean content?"),
    ({"messages": [{**USER, "name": 3}]}, "messages[0].name", "expected a string, got 3"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                   {"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[1]", "not served: the model takes text, no images",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0]", "not served: the model takes text, no audio",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        "messages[0].content[0]", "not served: the model takes text, no files",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        "messages[0].content[0].text", "expected a string, got 3",
    ),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "expected text, as there are no tool_calls"),
    (
        {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio",
        "not served: the model takes text and tool calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
                                                            "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments", 'expected a JSON object as a string, got "{"',
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].id", "required, and missing",
    ),
    (
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, "messages[0].tool_call_id",
        "expected the id of a call in an earlier message's tool_calls, got \"a\"",
    ),
    # Formats and tools.
    ({"response_format": {}}, "response_format.type", "required, and missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", 'expected "text" or "json_object" or "json_schema", got "xml"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required, and missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "y"}}},
        "response_format.json_schema.schema", 'expected a JSON schema as an object, got "y"',
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        "response_format", "nothing",
    ),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "expected one of json,"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "("),
    ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice", "expected at most 1000 strings, got 1001"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "expected an array of strings"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs",
        "expected response_format or this, got both",
    ),
    ({"structured_outputs": {"regex": "a"}, "tools": [NOW]}, "structured_outputs", "expected a JSON schema as an object beside tools"),
    ({"tools": {}}, "tools", "expected an array, got {}"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "not served: tools are functions"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required, and missing"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "expected up to 64 letters"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type", 'expected "object", got "string"',
    ),
    ({"tools": [NOW, NOW]}, "tools[1].function.name", "expected another name, as now is there already"),
    ({"tools": [NOW] * 129}, "tools", "expected at most 128, got 129"),
    ({"tool_choice": "required"}, "tool_choice", "expected tools with it, got none"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", 'expected "none", "auto", "required" or an object, got "always"'),
    ({"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "not served"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name", 'expected one of the tools (now), got "x"',
    ),
    (
        {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools", "expected at least one tool, got []",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "y"}}}}}],
         "tool_choice": "required"},
        "tools", "y",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "expected messages in the request itself"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "text"), CHAT, ids=[f"{param}-{at}" for at, (_, param, _) in enumerate(CHAT)]
)
def test_chats(client: TestClient, fields: dict[str, Any], param: str, text: str) -> None:
    found = error(client.post("/v1/chat/completions", json={"model": "m", "messages": [USER], **fields}))
    assert found["param"] == param
    assert found["type"] == "invalid_request_error"
    assert found["message"].startswith(param)
    assert text in found["message"]
    assert len(found["message"]) <= 600


COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "required, and missing"),
    ({"prompt": 3}, "prompt", "expected a string, an array of strings, of token ids, or of arrays of token ids, got 3"),
    ({"prompt": []}, "prompt", "expected at least one, got []"),
    ({"prompt": [[1], 2]}, "prompt[1]", "expected a string, an array of strings"),
    ({"prompt": [1, 258]}, "prompt[1]", "expected a token id from 0 to 257, got 258"),
    ({"prompt": [[1], [True]]}, "prompt[1][0]", "expected a token id from 0 to 257, got true"),
    ({"prompt": ""}, "prompt", "expected at least one token, got none"),
    ({"prompt": ["x"] * 2049}, "prompt", "expected at most 2048, got 2049"),
    ({"suffix": "end"}, "suffix", "not served: text is continued at its end only"),
    ({"logprobs": True}, "logprobs", "expected an integer from 0 to 20, got true"),
    ({"max_tokens": 0}, "max_tokens", "expected an integer of 1 or more, as there is no echo, got 0"),
    ({"n": 3, "best_of": 2}, "best_of", "expected an integer from 3 to 128, got 2"),
    ({"best_of": 9}, "best_of", "expected at most the engine's max_sequences (8), got 9"),
    ({"best_of": 2, "stream": True}, "stream", "not served: best_of decides at the end"),
    ({"echo": True, "logprobs": 1, "stream": True}, "stream", "not served: logprobs of an echoed prompt"),
    ({"messages": []}, "messages", "unknown parameter"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs", ""),
]


@pytest.mark.parametrize(
    ("fields", "param", "text"), COMPLETIONS, ids=[f"{param}-{at}" for at, (_, param, _) in enumerate(COMPLETIONS)]
)
def test_completions(client: TestClient, fields: dict[str, Any], param: str, text: str) -> None:
    found = error(client.post("/v1/completions", json={"model": "m", "prompt": "hi", **fields}))
    assert found["param"] == param
    assert text in found["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the request is no JSON"),
        (b"{", "the request is no JSON"),
        (b"\xff", "the request is no JSON"),
        ('{"model": "\\ud800"}'.encode("utf-16"), "the request is no JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"temperature": NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "the request is no JSON"),
        (b'{"model": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_what_is_no_json(client: TestClient, body: bytes, text: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        found = error(client.post(path, content=body))
        assert text in found["message"]
        assert found["code"] == "invalid_json"


def test_models(client: TestClient) -> None:
    for model, status in ((None, 400), (3, 400), ("x", 404)):
        for path, field in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "x"})):
            found = error(client.post(f"/v1/{path}", json={"model": model, **field}), status)
            assert found["param"] == "model"
    assert found["message"] == 'model: expected one that is served (m), got "x"'
    assert found["code"] == "model_not_found"
    assert error(client.get("/v1/models/org/x"), 404)["code"] == "model_not_found"


def test_other_paths(client: TestClient) -> None:
    assert error(client.post("/v1/responses", json={}), 404)["message"] == "there is no POST /v1/responses"
    answer = client.get("/v1/chat/completions")
    assert error(answer, 405)["message"] == "expected POST for /v1/chat/completions, got GET"
    assert answer.headers["allow"] == "POST"
    assert error(client.delete("/v1/models/m"), 405)["code"] == "method_not_allowed"


def test_prompts_that_do_not_fit(client: TestClient) -> None:
    long = "x" * 1000
    for path, param, field in (
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": long}]}),
        ("completions", "prompt", {"prompt": ["x", long]}),
    ):
        found = error(client.post(f"/v1/{path}", json={"model": "m", **field}))
        assert (found["param"], found["code"]) == (param, "context_length_exceeded")
        assert "expected at most 999 tokens" in found["message"]
    runner = ScriptRunner("x")
    runner.blocks = 5
    with serve(runner=runner) as small:
        found = error(small.post("/v1/completions", json={"model": "m", "prompt": "x" * 21}))
        assert "expected at most 20 tokens" in found["message"]
        assert small.post("/v1/completions", json={"model": "m", "prompt": "x" * 20}).status_code == 200


def test_models_without_text_or_template_or_tools() -> None:
    with serve(template=None) as plain:
        found = error(plain.post("/v1/chat/completions", json={"model": "m", "messages": [USER]}))
        assert found["message"] == "model: it has no chat template: use /v1/completions"
    with serve() as plain:
        body = {"model": "m", "messages": [USER], "tools": [NOW]}
        assert (
            "the model's chat template has no tools" in error(plain.post("/v1/chat/completions", json=body))["message"]
        )
    with serve(template="{{ tools }}x") as plain:
        found = error(plain.post("/v1/chat/completions", json=body))
        assert "start the server with one of mistral, qwen3_coder, hermes, llama3" in found["message"]
        assert plain.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200
    with serve(template="{{ tools }}x", options=Options(tool_format="hermes")) as plain:
        assert plain.post("/v1/chat/completions", json=body).status_code == 200
    with serve(template="{{ raise_exception('no such role') }}") as plain:
        found = error(plain.post("/v1/chat/completions", json={"model": "m", "messages": [USER]}))
        assert found["message"] == "messages: the chat template refuses the messages: no such role"


def test_a_bound_on_requests() -> None:
    runner = ScriptRunner("x")
    runner.gate.clear()
    with serve(runner=runner, options=Options(max_requests=2)) as client:
        body = {"model": "m", "prompt": "x"}
        threads = [threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body}) for _ in "ab"]
        for thread in threads:
            thread.start()
        engine: Engine = client.app.state.engine  # type: ignore[attr-defined]
        while engine.stats().requests < 1 or len(engine._core._inbox) + engine.stats().requests < 2:
            time.sleep(0.01)
        answer = client.post("/v1/completions", json=body)
        found = error(answer, 429)
        assert found["code"] == "rate_limit_exceeded"
        assert found["type"] == "rate_limit_error"
        assert found["message"] == 'model "m" has 2 requests already, which is the server\'s limit: try again'
        assert answer.headers["retry-after"] == "1"
        found = error(client.post("/v1/completions", json={"model": "m", "prompt": ["x"] * 3}))
        assert "expected at most 2 prompts" in found["message"]
        runner.gate.set()
        for thread in threads:
            thread.join()
        assert client.post("/v1/completions", json=body).status_code == 200


def test_a_limit_on_time() -> None:
    runner = ScriptRunner("x" * 900)
    runner.pace = 0.01
    with serve(runner=runner, options=Options(timeout=0.1)) as client:
        body = {"model": "m", "messages": [USER]}
        found = error(client.post("/v1/chat/completions", json=body), 504)
        assert (found["message"], found["code"]) == ("the request took longer than the server allows", "timeout")
        answer = client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 900, "stream": True})
        assert answer.text.splitlines()[0].startswith('data: {"id":')
        assert answer.text.splitlines()[-2].startswith('data: {"error":{"message":"the request took longer')


def test_options() -> None:
    with pytest.raises(InvalidArgumentError, match="Options: max_requests: expected a positive integer, got 0"):
        Options(max_requests=0)
    with pytest.raises(InvalidArgumentError, match="Options: timeout: expected seconds above 0, got -1"):
        Options(timeout=-1)
    with pytest.raises(InvalidArgumentError, match="Options: tool_format: expected one of mistral, .* got 'x'"):
        Options(tool_format={"m": "x"})


def test_an_engine_that_is_closed_or_fails() -> None:
    engine = Engine(ScriptRunner("x"))
    engine.close()
    with TestClient(Starlette(routes=list(routes(Models(m=engine))))) as client:
        found = error(client.post("/v1/completions", json={"model": "m", "prompt": "x"}), 503)
        assert found["code"] == "unavailable"

    class Failing(ScriptRunner):
        def run(self, plan: Any, rows: Any, tokens: Any = None) -> Any:
            raise ValueError("no such page")

    with serve(runner=Failing("x")) as client:
        body = {"model": "m", "messages": [USER]}
        found = error(client.post("/v1/chat/completions", json=body), 500)
        assert (found["type"], found["code"]) == ("server_error", "model_error")
        assert "no such page" in found["message"]
        answer = client.post("/v1/chat/completions", json={**body, "stream": True})
        assert answer.status_code == 200
        assert answer.text.startswith('data: {"error":{"message":"the step failed: ValueError: no such page"')
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize(
    ("exception", "status", "param", "message"),
    [
        (InvalidArgumentError("SamplingParams: n: expected x, got y"), 400, "n", "n: expected x, got y"),
        (InvalidArgumentError("SamplingParams: logit_bias[3]: no"), 400, "logit_bias", "logit_bias[3]: no"),
        (InvalidArgumentError("SamplingParams: json_schema: no"), 400, "response_format", "response_format: no"),
        (InvalidArgumentError("something else"), 400, None, "something else"),
        (UnsupportedError("needs the package llguidance"), 400, None, "needs the package llguidance"),
        (ClosedError("closed"), 503, None, "the model is not served any more: closed"),
        (OutOfMemoryError("full"), 500, None, "full"),
        (ModelError("bad"), 500, None, "bad"),
        (HTTPException(413, "the body is too large"), 413, None, "the body is too large"),
        (RecursionError(), 400, None, "the request is nested too deeply"),
        (KeyError("secret"), 500, None, "internal error: KeyError"),
    ],
)
def test_exceptions(exception: Exception, status: int, param: str | None, message: str) -> None:
    found = from_exception(exception, {"json_schema": "response_format"})
    assert (found.status, found.param, found.message) == (status, param, message)


@pytest.mark.slow
def test_every_parameter_of_the_clients_types_is_known() -> None:
    openai = pytest.importorskip("openai")
    for table, types in (
        (parameters.CHAT, openai.types.chat.completion_create_params.CompletionCreateParamsBase),
        (parameters.COMPLETIONS, openai.types.completion_create_params.CompletionCreateParamsBase),
        (parameters.EMBEDDINGS, openai.types.embedding_create_params.EmbeddingCreateParams),
    ):
        assert set(types.__annotations__) <= set(table)
