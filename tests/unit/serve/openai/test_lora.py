"""Adapters as models of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from tests.lora_adapters import write_adapter
from tests.unit.serve.openai.api import ScriptRunner, events, serve
from untorch.llm.logits import Logits
from untorch.llm.lora import Loras
from untorch.llm.scheduler import Plan
from untorch.llm.settings import LoraLayer, LoraSettings

SETTINGS = LoraSettings("float32", 7, (LoraLayer("l.q", 4, 3, 0),), ((16, "step_16_lora"),))


class Adapted(ScriptRunner):
    """Notes the adapter of each step."""

    def __init__(self) -> None:
        super().__init__("Hello!")
        self.loras = Loras(SETTINGS, "cpu")
        self.seen: set[str | None] = set()

    def run(self, plan: Plan, rows: object, tokens: object = None) -> Logits:
        self.seen |= {None if item.sequence.lora is None else item.sequence.lora.name for item in plan.items}
        return super().run(plan, rows, tokens)  # type: ignore[arg-type]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[TestClient, Adapted]]:
    runner = Adapted()
    with serve(runner=runner) as client:
        for name in ("sql", "m"):  # the second has the name of the model, which is found first
            pair = {"l.q": (torch.ones(2, 4), torch.ones(3, 2))}
            client.app.state.engine.load_lora(name, write_adapter(tmp_path / name, pair))  # type: ignore[attr-defined]
        yield client, runner


def test_models(made: tuple[TestClient, Adapted]) -> None:
    client, _ = made
    found = {model["id"]: model.get("parent") for model in client.get("/v1/models").json()["data"]}
    assert found == {"m": None, "sql": "m"}
    one = client.get("/v1/models/sql").json()
    assert (one["id"], one["parent"], one["max_model_len"]) == ("sql", "m", 1000)


@pytest.mark.parametrize(("model", "adapter"), [("sql", "sql"), ("m", None)])
def test_requests_name_an_adapter(made: tuple[TestClient, Adapted], model: str, adapter: str | None) -> None:
    client, runner = made
    message = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    answer = client.post("/v1/chat/completions", json=message).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == (model, "Hello!")
    assert runner.seen == {adapter}
    answer = client.post("/v1/completions", json={"model": model, "prompt": ["a", "b"]}).json()
    assert (answer["model"], len(answer["choices"])) == (model, 2)
    streamed = events(client.post("/v1/chat/completions", json={**message, "stream": True}))
    assert {event["model"] for event in streamed} == {model}
    assert runner.seen == {adapter}


def test_unknown_names(made: tuple[TestClient, Adapted]) -> None:
    client, _ = made
    answer = client.post("/v1/completions", json={"model": "none", "prompt": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == 'model: expected one that is served (m, sql), got "none"'
    client.app.state.engine.unload_lora("sql")  # type: ignore[attr-defined]
    assert client.post("/v1/completions", json={"model": "sql", "prompt": "a"}).status_code == 404
    assert client.post("/v1/embeddings", json={"model": "sql", "input": "a"}).status_code == 404
