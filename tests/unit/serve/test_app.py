"""The application in this process: language models, metrics of engines, traces, the room for the OpenAI API."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import sys
import types
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from untorch import InvalidArgumentError
from untorch.serve.app import build_app
from untorch.serve.middleware import is_authorized
from untorch.serve.options import ServeOptions
from untorch.serve.state import ServerState

Answer = tuple[int, dict[str, str], bytes]


def call(app: Starlette, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None) -> Answer:
    """One request, without a server."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "client": ("here", 1), "server": ("here", 2),
        "headers": [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()],
    }  # fmt: skip

    async def main() -> None:
        messages = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            return await asyncio.Event().wait()  # the client stays

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)

    asyncio.run(main())
    start = sent[0]
    found = {key.decode(): value.decode() for key, value in start["headers"]}
    return start["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


def text(values: list[str]) -> dict[str, Any]:
    return {"name": "text_input", "datatype": "BYTES", "shape": [len(values)], "data": values}


def test_a_language_model_by_the_protocol(state: ServerState) -> None:
    app = build_app(state.options, state)
    status, _, body = call(app, "POST", "/v2/models/lm/infer", {"inputs": [text(["a", "b"])]})
    assert status == 200, body
    assert json.loads(body)["outputs"] == [
        {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["hello", "hello"]}
    ]
    request = {"inputs": [text(["a"])], "parameters": {"max_tokens": 2, "temperature": 0}}
    _, _, body = call(app, "POST", "/v2/models/lm/infer", request)
    assert json.loads(body)["outputs"][0]["data"] == ["he"]
    _, _, body = call(app, "GET", "/v2/models/lm")
    document = json.loads(body)
    assert (document["platform"], document["inputs"]) == (
        "untorch_llm",
        [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}],
    )


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"parameters": {"max_token": 1}}, "model 'lm': parameter 'max_token': expected one of max_tokens, "),
        ({"parameters": {"max_tokens": "1"}}, "model 'lm': parameter 'max_tokens': expected int, got '1'"),
        ({"parameters": {"top_p": 7}}, "SamplingParams: top_p: expected"),
        ({"inputs": [{**text(["a"]), "name": "x"}]}, "model 'lm': expected the input text_input: BYTES[-1]"),
        ({"inputs": [{"name": "text_input", "datatype": "FP32", "shape": [1], "data": [1]}]}, "model 'lm': expected"),
        ({"inputs": [text([""])]}, "prompt: expected at least one token, got none"),
    ],
)
def test_wrong_requests_of_a_language_model(state: ServerState, fields: dict[str, Any], error: str) -> None:
    app = build_app(state.options, state)
    status, _, body = call(app, "POST", "/v2/models/lm/infer", {"inputs": [text(["a"])], **fields})
    assert (status, json.loads(body)["error"][: len(error)]) == (400, error)


def test_nulls_count_as_absent(state: ServerState) -> None:
    app = build_app(state.options, state)
    tensor = {**text(["a"]), "parameters": None}
    request = {"id": None, "parameters": None, "outputs": None, "inputs": [tensor]}
    status, _, body = call(app, "POST", "/v2/models/lm/infer", request)
    assert (status, "id" in json.loads(body)) == (200, False), body
    outputs = [{"name": "text_output", "parameters": None}]
    assert call(app, "POST", "/v2/models/lm/infer", {"inputs": [tensor], "outputs": outputs})[0] == 200
    status, _, body = call(app, "POST", "/v2/models/lm/infer", {"inputs": None})
    assert (status, json.loads(body)["error"]) == (400, "inputs: expected a list of tensors, got none")


def test_a_model_that_is_not_loaded(state: ServerState) -> None:
    """503 by both protocols, after which clients try again; 404 is for names that are not known."""
    state.repository._entries["other"] = types.SimpleNamespace(  # type: ignore[assignment]
        path="other.pt2", package=None, state="UNAVAILABLE", reason="unloaded"
    )
    app = build_app(state.options, state)
    for name, expected in (("other", 503), ("none", 404)):
        chat = {"model": name, "messages": [{"role": "user", "content": "a"}]}
        for method, path, body in (
            ("POST", f"/v2/models/{name}/infer", {"inputs": [text(["a"])]}),
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/completions", {"model": name, "prompt": "a"}),
            ("POST", "/v1/embeddings", {"model": name, "input": "a"}),
            ("GET", f"/v1/models/{name}", b""),
        ):
            status, _, answer = call(app, method, path, body)
            assert status == expected, (path, answer)
    error = json.loads(call(app, "GET", "/v1/models/other")[2])["error"]
    assert (error["message"], error["code"]) == ('model "other" is not loaded: unloaded', "unavailable")


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_pages_of_other_origins(state: ServerState, keys: tuple[str, ...]) -> None:
    named = "https://app.example"
    options = dataclasses.replace(state.options, api_keys=keys, cors_origins=(named,))
    app = build_app(options, state)
    key = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    body = {"model": "lm", "prompt": "a"}
    for origin, allowed in ((named, True), ("https://evil.example", False), ("http://app.example", False)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
        status, headers, _ = call(app, "OPTIONS", "/v1/completions", b"", asked)
        assert status == (200 if allowed else 400)
        assert headers.get("access-control-allow-origin") == (origin if allowed else None)
        if allowed:
            assert "x-stainless-os" in headers["access-control-allow-headers"]
        status, headers, _ = call(app, "POST", "/v1/completions", body, {"Origin": origin, **key})
        assert status == (200 if allowed or keys else 403)
        assert headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert "x-request-id" in headers
        if keys:  # the page may read why
            status, headers, _ = call(app, "POST", "/v1/completions", body, {"Origin": origin})
            assert (status, headers.get("access-control-allow-origin")) == (401, origin if allowed else None)
    app = build_app(dataclasses.replace(options, cors_origins=("*",)), state)
    status, headers, _ = call(app, "POST", "/v1/completions", body, {"Origin": "https://a.b", **key})
    assert (status, headers["access-control-allow-origin"]) == (200, "*")


def test_without_named_origins(state: ServerState) -> None:
    app = build_app(state.options, state)
    status, _, body = call(app, "GET", "/v1/models", b"", {"Origin": "https://a.b", "Host": "c"})
    text = "Origin: expected a page of this server: name others by --cors-origin"
    assert (status, json.loads(body)["error"]["message"]) == (403, text)
    assert call(app, "GET", "/v1/models", b"", {"Origin": "http://c", "Host": "c"})[0] == 200


def test_compressed_bodies(state: ServerState) -> None:
    app = build_app(state.options, state)
    body = json.dumps({"model": "lm", "prompt": "a", "max_tokens": 8, "temperature": 0}).encode()

    def post(data: bytes, encoding: str, path: str = "/v1/completions") -> tuple[int, str]:
        status, _, answer = call(app, "POST", path, data, {"Content-Encoding": encoding})
        document = json.loads(answer)
        return status, document["error"]["message"] if status != 200 else document["choices"][0]["text"]

    assert post(gzip.compress(body), "gzip") == (200, "hello")
    assert post(zlib.compress(body), "deflate") == (200, "hello")
    assert post(body, "identity") == (200, "hello")
    assert post(body, "gzip")[0] == 400
    assert post(body, "gzip")[1].startswith("Content-Encoding gzip: the body is damaged: ")
    assert post(body, "br") == (400, "Content-Encoding: expected gzip or deflate, got 'br'")
    assert post(gzip.compress(b" " * (65 * 2**20)), "gzip")[0] == 413
    form = post(body, "gzip", "/v1/audio/transcriptions")
    assert form == (400, "Content-Encoding: expected none for a form, got 'gzip'")


def test_metrics_of_engines(state: ServerState) -> None:
    app = build_app(state.options, state)
    call(app, "POST", "/v2/models/lm/infer", {"inputs": [text(["a", "b"])]})
    for _ in range(2):  # read twice, counted once
        status, _, body = call(app, "GET", "/metrics")
    lines = body.decode().splitlines()
    assert status == 200
    assert 'untorch_llm_requests_total{model="lm"} 2.0' in lines
    assert 'untorch_llm_generated_tokens_total{model="lm"} 12.0' in lines
    assert 'untorch_llm_kv_usage{model="lm"} 0.0' in lines
    for name in ("drafts", "draft_tokens", "accepted_tokens", "prefix_hits"):
        assert f'untorch_llm_{name}_total{{model="lm"}} 0.0' in lines
    assert 'untorch_llm_time_to_first_token_seconds_count{model="lm"} 2.0' in lines
    assert 'untorch_llm_time_per_output_token_seconds_count{model="lm"} 2.0' in lines


def test_the_openai_routes(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    def routes(engines: Any, options: Any, transcribers: Any, embedders: Any) -> list[Route]:
        async def models(request: Request) -> Response:
            found = [engines.names(), engines.get("lm") is not None, options.max_requests]
            return JSONResponse([*found, transcribers.names(), embedders.names()])

        async def fails(request: Request) -> Response:
            raise ValueError("secret")

        assert options.metrics is state.metrics
        return [Route("/v1/models", models), Route("/v1/fails", fails)]

    monkeypatch.setattr("untorch.serve.openai.routes", routes)
    app = build_app(state.options, state)
    assert json.loads(call(app, "GET", "/v1/models")[2]) == [["lm"], True, state.options.max_queue, [], []]
    # What routes raise becomes an answer that tells nothing of the inside.
    status, headers, body = call(app, "GET", "/v1/fails")
    assert status == 500
    assert json.loads(body)["error"] == {
        "message": f"internal error; request id {headers['x-request-id']}", "type": "server_error", "param": None,
        "code": None,
    }  # fmt: skip


def test_a_tool_format_that_is_unknown() -> None:
    with pytest.raises(InvalidArgumentError, match="tool_format: expected one of .*hermes.*, got 'xml'"):
        build_app(ServeOptions(repository="/nowhere", tool_format="xml"))


def test_spans(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is a child of the caller's span; the call of the model is one of its own."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    state.tracer._tracer = provider.get_tracer("test")
    assert state.tracer.enabled
    app = build_app(state.options, state)
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
    call(app, "POST", "/v2/models/lm/infer", {"inputs": [text(["a"])]}, headers)
    inner, outer = exporter.get_finished_spans()
    assert (outer.name, inner.name) == ("POST /v2/models/lm/infer", "infer")
    assert f"{outer.context.trace_id:032x}" == trace_id
    assert outer.parent is not None
    assert f"{outer.parent.span_id:016x}" == parent
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert inner.attributes["model"] == "lm"


def test_no_spans_without_a_provider() -> None:
    pytest.importorskip("opentelemetry.trace")
    from untorch.serve.tracing import Tracer

    tracer = Tracer()
    assert not tracer.enabled
    with tracer.server_span("POST /", {"traceparent": "00-1-1-01"}) as outer, tracer.span("infer", model="m") as inner:
        assert outer is None and inner is None


def test_a_provider_that_is_set_later(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from untorch.serve.tracing import Tracer

    now = 100.0
    monkeypatch.setattr("untorch.serve.tracing.time.monotonic", lambda: now)
    tracer = Tracer()
    assert not tracer.enabled
    provider = trace.TracerProvider()
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    assert not tracer.enabled
    now += 1
    assert tracer.enabled


def test_no_spans_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from untorch.serve.tracing import Tracer

    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    tracer = Tracer()
    assert not tracer.enabled
    with tracer.span("a") as one, tracer.server_span("b", {}) as two:
        assert one is two is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("Bearer one", True), ("bearer two", True), ("Bearer  two ", True), ("", False), ("Bearer", False),
     ("Bearer on", False), ("Basic one", False), ("one", False), ("Bearer ünë", False)],
)  # fmt: skip
def test_keys(value: str, expected: bool) -> None:
    assert is_authorized(value, ("one", "two")) is expected
    assert not is_authorized(value, ())


@pytest.mark.slow
def test_a_body_that_is_too_large_is_refused_whatever_a_route_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by one that catches everything."""

    async def eat(request: Request) -> Response:
        try:
            return JSONResponse(len(await request.body()))
        except Exception:
            return JSONResponse("eaten")

    monkeypatch.setattr("untorch.serve.openai.routes", lambda *given: [Route("/v1/eat", eat, methods=["POST"])])
    app = build_app(ServeOptions(repository="/nowhere", max_body=10))
    assert call(app, "POST", "/v1/eat", b"0123456789")[2] == b"10"
    status, headers, body = call(app, "POST", "/v1/eat", b"0123456789a")
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["error"]["message"] == "expected a body of at most 10 bytes (--max-body)"


def test_keys_below_v1_are_asked_for_in_openais_envelope() -> None:
    app = build_app(ServeOptions(repository="/nowhere", api_keys=("secret",)))
    status, _, body = call(app, "GET", "/v1/models")
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


def test_a_full_queue_asks_for_another_try() -> None:
    from untorch.serve.endpoint import error_response
    from untorch.serve.errors import QueueFullError

    response = error_response(QueueFullError("model 'm': 5 calls wait already: try again later"), {"path": "/v2"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert json.loads(bytes(response.body)) == {"error": "model 'm': 5 calls wait already: try again later"}


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_errors_cross_the_connection_to_the_supervisor() -> None:
    """A worker's error keeps its class, and so its status."""
    import socket

    from untorch.runtime.errors import InvalidFileError, ModelError
    from untorch.serve.control import Control
    from untorch.serve.errors import ModelNotFoundError, NotReadyError

    async def main() -> None:
        ours, theirs = socket.socketpair()
        worker, supervisor = await Control.open(ours), await Control.open(theirs)

        async def obey() -> None:
            async for _ in worker:
                pass

        listening = asyncio.create_task(obey())
        for kind, expected in (
            ("ModelNotFoundError", ModelNotFoundError), ("InvalidFileError", InvalidFileError),
            ("ZeroDivisionError", ModelError), (None, None),
        ):  # fmt: skip
            asked = asyncio.create_task(worker.ask("load", "m"))
            message = await supervisor.receive()
            assert message is not None
            assert (message["action"], message["name"]) == ("load", "m")
            error = None if kind is None else [kind, "text"]
            await supervisor.send({"answer": message["ask"], "error": error})
            if expected is None:
                await asked
                continue
            with pytest.raises(expected, match="text"):
                await asked
        asked = asyncio.create_task(worker.ask("load", "m"))
        await supervisor.receive()
        await supervisor.close()
        with pytest.raises(NotReadyError, match="the server is shutting down"):
            await asked
        await listening
        await worker.close()

    run(main)
