"""Bounds of language models: prompts by both protocols together, and the time of a request."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.unit.serve.openai.api import ScriptRunner
from tests.unit.serve.test_app import call
from tests.unit.serve.test_repository import open_text_model
from untorch import InvalidArgumentError
from untorch.serve.admission import Admission
from untorch.serve.app import build_app
from untorch.serve.errors import QueueFullError
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Repository
from untorch.serve.state import ServerState


def test_admission() -> None:
    admission = Admission(3)
    leave = admission.enter("a", 2)
    with pytest.raises(QueueFullError, match="model 'a': 2 of 3 prompts run and wait already: try again later"):
        admission.enter("a", 2)
    admission.enter("b", 3)
    leave()
    admission.enter("a", 3)
    with pytest.raises(
        InvalidArgumentError, match="model 'c': expected at most 3 prompts, which is the server's limit, got 4"
    ):
        admission.enter("c", 4)
    Admission(None).enter("a", 10**6)


def serve(monkeypatch: pytest.MonkeyPatch, runner: ScriptRunner, **options: Any) -> ServerState:
    def open_model(repository: Repository, name: str, path: str) -> Any:
        return open_text_model(repository, name, path, runner)

    monkeypatch.setattr(Repository, "_open", open_model)
    state = ServerState(ServeOptions(models={"lm": "lm.pt2"}, page=False, **options))
    state.repository.load_all()
    state.loaded = True
    return state


def requests(count: int = 1) -> list[tuple[str, dict[str, Any]]]:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [count], "data": ["a"] * count}
    return [
        ("/v1/completions", {"model": "lm", "prompt": ["a"] * count, "max_tokens": 900, "ignore_eos": True}),
        ("/v2/models/lm/infer", {"inputs": [tensor], "parameters": {"max_tokens": 900, "ignore_eos": True}}),
    ]


def test_prompts_of_both_protocols_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ScriptRunner("Hello")
    state = serve(monkeypatch, runner, max_queue=3)
    app = build_app(state.options, state)
    for path, body in requests(4):
        assert call(app, "POST", path, body)[0] == 400
    runner.gate.clear()
    threads = [threading.Thread(target=call, args=(app, "POST", path, body)) for path, body in requests()]
    for thread in threads:
        thread.start()
    engine = state.repository.packages[0].engine
    assert engine is not None
    while engine._core.requests < 1 or sum(state.repository.admission._live.values()) < 2:
        pass
    for path, body in requests(2):
        status, headers, text = call(app, "POST", path, body)
        assert (status, headers["retry-after"]) == (429, "1"), text
    runner.gate.set()
    for thread in threads:
        thread.join()
    assert call(app, "POST", *requests(2)[1])[0] == 200
    state.repository.close()


def test_requests_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --llm-timeout, not --timeout: a text takes longer than a call of a method."""
    runner = ScriptRunner("Hello")
    runner.pace = 0.01
    state = serve(monkeypatch, runner, timeout=0.001, llm_timeout=0.2)
    app = build_app(state.options, state)
    for path, body in requests():
        status, _, text = call(app, "POST", path, body)
        assert status == 504, text
    runner.pace = 0.0
    assert call(app, "POST", "/v2/models/lm/infer", requests()[1][1] | {"parameters": {}})[0] == 200
    state.repository.close()


def test_embeddings_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ScriptRunner("Hello", task="embed", width=258)
    runner.pace = 0.1
    state = serve(monkeypatch, runner, llm_timeout=0.05)
    status, _, body = call(
        build_app(state.options, state), "POST", "/v1/embeddings", {"model": "lm", "input": "x" * 300}
    )
    assert (status, json.loads(body)["error"]["code"]) == (504, "timeout")
    state.repository.close()


def test_memory_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ScriptRunner("Hello")
    state = serve(monkeypatch, runner)
    monkeypatch.setattr(runner, "memory", lambda: {"mapped": 7, "kv_cache": 5}, raising=False)
    lines = call(build_app(state.options, state), "GET", "/metrics")[2].decode().splitlines()
    assert 'untorch_memory_bytes{kind="kv_cache",package="lm"} 5.0' in lines
    assert 'untorch_memory_bytes{kind="mapped",package="lm"} 7.0' in lines
    state.repository.close()
