"""The pipeline of language models: texts, conversations and token ids in, text out, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import TextRunner
from tests.unit.llm.test_settings import SECTION
from untorch.llm import Engine
from untorch.pipeline.generation import TextGeneration
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

TEXT = "Hello, wörld!"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"


class Program:
    path = "m.pt2"

    def __init__(self, **change: Any) -> None:
        self.manifest = {"llm": {**SECTION, **change}}


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextGeneration]:
    runner = TextRunner(TEXT, TEMPLATE, max_positions=400, blocks=200)
    monkeypatch.setattr("untorch.pipeline.generation.Engine", lambda program: Engine(runner))
    with TextGeneration(Program(), owned=False) as made:  # type: ignore[arg-type]
        yield made


def test_text(pipeline: TextGeneration) -> None:
    assert (pipeline.task, pipeline.architecture) == ("text-generation", "LlamaForCausalLM")
    assert pipeline("hi") == TEXT
    assert pipeline(["hi", "there"]) == [TEXT, TEXT]
    assert pipeline([]) == []
    assert list(pipeline(iter(["hi", "there"]), max_tokens=3)) == ["Hel", "Hel"]
    assert pipeline("hi", stop="wö") == "Hello, "
    assert pipeline([5, 6], max_tokens=3) == "Hel"
    assert pipeline([[5, 6], "hi"], max_tokens=3) == ["Hel", "Hel"]


def test_conversations(pipeline: TextGeneration) -> None:
    turn = [{"role": "user", "content": "hi"}]
    assert pipeline(turn) == TEXT
    assert pipeline.engine.stats().prompt_tokens == len(b"user: hi\nbot:")
    assert pipeline([turn, turn], max_tokens=3) == ["Hel", "Hel"]


def test_pieces(pipeline: TextGeneration) -> None:
    pieces = list(pipeline("hi", stream=True))
    assert len(pieces) > 1 and "".join(pieces) == TEXT
    assert "".join(pipeline([{"role": "user", "content": "hi"}], stream=True, max_tokens=3)) == "Hel"
    left = pipeline("hi", stream=True)
    next(left)
    left.close()
    with pytest.raises(InvalidArgumentError, match="stream: expected one input, got several: call it for each of them"):
        pipeline(["hi"], stream=True)
    with pytest.raises(InvalidArgumentError, match="stream: expected True or False, got 1"):
        pipeline("hi", stream=1)


def test_what_is_refused(pipeline: TextGeneration) -> None:
    with pytest.raises(ArgumentTypeError, match="unknown option 'max_new_tokens'; did you mean 'max_tokens'?"):
        pipeline("hi", max_new_tokens=3)
    with pytest.raises(InvalidArgumentError, match="SamplingParams: top_p: expected a finite number above 0 to 1"):
        pipeline("hi", top_p=2)
    with pytest.raises(ArgumentTypeError, match="prompt: expected text or a list of token ids, got 3.5"):
        pipeline(3.5)
    with pytest.raises(InvalidArgumentError, match="prompt: token 0: expected an id from 0 to 257, got 999"):
        pipeline([999])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "prompt: expected text or a list of token ids, got 3"),
        (np.int64(3), "prompt: expected text or a list of token ids, got np.int64(3)"),
        (b"hi", "prompt: expected text or a list of token ids, got bytes: decode it"),
        (np.zeros((1, 2), np.int64), "prompt: expected text or a list of token ids, got int64 [1, 2]"),
        (np.zeros(2), "prompt: expected text or a list of token ids, got float64 [2]"),
        (["hi", b"hi"], "pipeline: inputs[1]: prompt: expected text or a list of token ids, got bytes: decode it"),
        (["hi"] * 70 + ["\ud800"], "pipeline: inputs[70]: prompt: expected Unicode text, got a lone surrogate"),
        (["hi", ""], "pipeline: inputs[1]: prompt: expected at least one token, got none"),
        (
            [{"text": "hi"}],
            'prompt: expected messages such as {"role": "user", "content": "…"}, got {\'text\': \'hi\'}',
        ),
        ([{"role": 1, "content": "hi"}], "prompt: expected messages such as "),
    ],
)
def test_prompts_that_are_refused(pipeline: TextGeneration, given: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pipeline(given)
    assert str(caught.value).startswith(text)


def test_token_ids_and_iterators(pipeline: TextGeneration) -> None:
    assert pipeline(np.array([5, 6]), max_tokens=3) == "Hel"
    with pytest.raises(ArgumentTypeError, match=r"^pipeline: inputs\[0\]: prompt: expected text .*, got 5$"):
        list(pipeline(iter([5, 6])))


def test_models_that_generate_nothing() -> None:
    section = {"task": "embed", "pooling": "mean", "width": 8}
    with pytest.raises(InvalidFileError, match=r"generates no text: use untorch.llm.Engine\('m.pt2'\).embed"):
        TextGeneration(Program(**section), owned=False)  # type: ignore[arg-type]
