"""Replicas of a language model, with the engine of the tests; tests/integrations/ray has Ray."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import untorch
from tests.unit.llm.fake import FakeRunner, greedy
from untorch.integrations.ray import llm as module
from untorch.llm import Engine, SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[module.LanguageModelServer]:
    monkeypatch.setattr(module, "Engine", lambda path, **options: Engine(FakeRunner(), **options))
    made = module.LanguageModelServer("lm.pt2", {"max_batch_tokens": 16, "max_sequences": 8, "text": False})
    yield made
    made._engine.close()


def request(document: Any, method: str = "POST") -> Any:
    requests = pytest.importorskip("starlette.requests")

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(document).encode(), "more_body": False}

    return requests.Request({"type": "http", "method": method, "headers": []}, receive)


def test_generate_and_stream(server: module.LanguageModelServer) -> None:
    async def main() -> None:
        output = await server.generate(PROMPT, {"max_tokens": 4, "temperature": 0})
        (completion,) = output["completions"]
        assert completion == {"index": 0, "text": "", "token_ids": greedy(PROMPT, 4), "finish_reason": "length"}
        assert output["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0, "draft_tokens": 0, "accepted_tokens": 0,
        }  # fmt: skip
        chunks = [chunk async for chunk in server.stream(PROMPT, {"max_tokens": 4, "temperature": 0})]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == greedy(PROMPT, 4)
        assert chunks[-1]["finish_reason"] == "length" and chunks[-1]["usage"]["completion_tokens"] == 4
        assert all("finish_reason" not in chunk for chunk in chunks[:-1])
        params = SamplingParams(max_tokens=2, temperature=0)
        outputs = await asyncio.gather(*(server.generate([i + 1], params) for i in range(20)))  # type: ignore[arg-type]
        for i, output in enumerate(outputs):
            assert output["completions"][0]["token_ids"] == greedy([i + 1], 2)

    asyncio.run(main())


def test_cancelling_ends_the_request(server: module.LanguageModelServer) -> None:
    async def main() -> None:
        async for _ in (chunks := server.stream(PROMPT, {"max_tokens": 150, "ignore_eos": True})):
            break
        await chunks.aclose()
        task = asyncio.ensure_future(server.generate(PROMPT, {"max_tokens": 150, "ignore_eos": True}))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if server._engine.stats().running == 0:
                break
            await asyncio.sleep(0.01)
        stats = server._engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks_free == stats.blocks

    asyncio.run(main())


def test_http(server: module.LanguageModelServer) -> None:
    params = {"max_tokens": 3, "temperature": 0}

    async def main() -> None:
        response: Any = await server(request({"prompt": PROMPT, "params": params}))
        assert response.status_code == 200
        assert json.loads(response.body)["completions"][0]["token_ids"] == greedy(PROMPT, 3)
        response = await server(request({"prompt": PROMPT, "params": params, "stream": True}))
        assert response.media_type == "text/event-stream"
        events = [event async for event in response.body_iterator]
        assert events[-1] == "data: [DONE]\n\n"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == greedy(PROMPT, 3)
        for document, text in (
            ({}, "expected prompt or messages, one of them"),
            ({"prompt": [1], "messages": []}, "expected prompt or messages, one of them"),
            ({"prompt": [1], "max_tokens": 3}, "expected the fields messages, params, prompt, stream, got max_tokens"),
            ({"prompt": [1], "params": {"max_token": 3}}, "params: expected n, best_of, .*, got max_token"),
            ({"prompt": [1], "params": 3}, "params: expected an object, got int"),
            ({"prompt": [1], "stream": "yes"}, "stream: expected true or false, got 'yes'"),
            ({"prompt": [99999], "stream": True}, "expected"),
            ({"prompt": [1], "params": {"temperature": -1}}, "temperature"),
            ({"messages": [{"role": "user", "content": "x"}]}, "chat"),
        ):
            response = await server(request(document))
            assert response.status_code == 400, document
            import re

            assert re.search(text, json.loads(response.body)["error"]), json.loads(response.body)
        assert (await server(request({}, "GET"))).status_code == 405

    asyncio.run(main())


def test_the_openai_app_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    monkeypatch.setattr(module, "Engine", lambda path, **options: Engine(FakeRunner(), text=False, **options))
    seen: dict[str, Any] = {}
    api = types.ModuleType("untorch.serve.openai")
    api.Options = lambda **options: options  # type: ignore[attr-defined]

    def routes(engines: Any, options: Any) -> list[Any]:
        seen.update(engines=engines, options=options)
        return []

    api.routes = routes  # type: ignore[attr-defined]
    package = types.ModuleType("untorch.serve")
    monkeypatch.setitem(sys.modules, "untorch.serve", package)
    monkeypatch.setitem(sys.modules, "untorch.serve.openai", api)
    app = module.openai_app("lm.pt2", "lm", {"max_sequences": 4}, {"max_requests": 3})
    engine = seen["engines"].get("lm")
    assert seen["engines"].names() == ["lm"] and seen["engines"].get("other") is None
    assert seen["options"] == {"max_requests": 3}
    assert engine.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0)).token_ids == greedy(PROMPT, 2)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(live())
    with pytest.raises(untorch.ClosedError):
        engine.submit(PROMPT)


def test_openai_needs_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "import_serve", lambda: None)
    monkeypatch.setattr(module, "_has_openai", lambda: False)
    with pytest.raises(
        untorch.UnsupportedError, match=r"^openai: this untorch has no OpenAI API, which needs pip install"
    ):
        module.openai("lm.pt2")
