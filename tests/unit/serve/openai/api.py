"""Models that say what a test wants, behind the API in this process."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.llm.fake import FakeRunner, byte_tokenizer
from untorch.llm import Engine
from untorch.llm.logits import Logits
from untorch.llm.scheduler import Plan
from untorch.llm.tokenizer import Tokenizer
from untorch.serve.openai import Options, routes

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)
TOOLS_TEMPLATE = "{{ tools | tojson if tools else '' }}{# <tool_call> #}" + TEMPLATE


class Models:
    """What ``routes`` wants."""

    def __init__(self, **engines: Any) -> None:
        self.engines = engines

    def names(self) -> list[str]:
        return list(self.engines)

    def get(self, name: str) -> Any:
        return self.engines.get(name)


class ScriptRunner(FakeRunner):
    """Says one text whatever the prompt is, byte by byte. special: more tokens, from 258 on. pace: seconds a step."""

    pace = 0.0

    def __init__(
        self, text: str, template: str | None = TEMPLATE, special: tuple[str, ...] = (), **settings: Any
    ) -> None:
        files = {"tokenizer.json": byte_tokenizer(("<s>", "</s>", *special))}
        if template is not None:
            files["template"] = template.encode()
            settings["chat_template"] = "template"
        width = 258 + len(special)
        super().__init__(
            files=files, vocabulary=width, tokenizer="tokenizer.json", stop_ids=(257,), max_positions=1000, blocks=500,
            **settings,
        )  # fmt: skip
        self.width = width
        self.script = [*Tokenizer(files["tokenizer.json"]).encode(text), 257]

    def run(self, plan: Plan, rows: Sequence[int], tokens: object = None) -> Logits:
        self.gate.wait()
        time.sleep(self.pace)
        logits = np.zeros((len(rows), self.width), np.float32)
        places = {row: at for at, row in enumerate(rows)}
        end = 0
        for item in plan.items:
            end += item.count
            sequence = item.sequence
            if item.end == len(sequence.tokens):
                at = len(sequence.tokens) - sequence.prompt_length
                logits[places[end - 1], self.script[at % len(self.script)]] = 30
        return Logits(logits)


@contextlib.contextmanager
def serve(
    text: str = "Hello!", options: Options | None = None, runner: FakeRunner | None = None, **settings: Any
) -> Iterator[TestClient]:
    """The model ``m`` says the text; ``client.app.engine`` is its engine."""
    with Engine(runner or ScriptRunner(text, **settings), max_batch_tokens=64, max_sequences=8) as engine:
        app = Starlette(routes=list(routes(Models(m=engine), options)))
        app.state.engine = engine
        with TestClient(app) as client:
            yield client


def chat(client: TestClient, content: str = "hi", **fields: Any) -> Any:
    """The JSON of a chat's answer."""
    answer = client.post(
        "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer: Any) -> list[dict[str, Any]]:
    """Of a stream, which must end as it should."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return events(
        client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields},
        )
    )
