"""Reranking and prompts of embeddings: what they return and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.pipeline.reranking import Reranking
from untorch.pipeline.settings import Settings
from untorch.pipeline.text import TextEmbedding
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError


class Tokens:
    """A text is its characters."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.places: list[tuple[str, int]] = []

    def encode(self, texts: Any, truncation: bool = False, name: str = "inputs", first: int = 0) -> Any:
        self.places.append((name, first))
        self.seen += texts
        return texts

    def arrays(self, encodings: Any) -> Any:
        return {"pairs": encodings}


def make(kind: Any, **values: Any) -> Any:
    pipeline = kind.__new__(kind)
    pipeline.settings, pipeline.task = Settings(values, "m.pt2"), "task"
    pipeline.tokens = Tokens()
    return pipeline


def reranking() -> Any:
    """A document's score: its length less the query's."""
    pipeline = make(Reranking, activation="none")
    pipeline.call = lambda method, arguments: np.array(
        [[len(one["text_pair"]) - len(one["text"])] for one in arguments["pairs"]], np.float32
    )
    return pipeline


def test_documents_by_their_scores() -> None:
    given = {"query": "ab", "documents": ["a", "abcd", "abc", "xyz"]}
    found = reranking()(given)
    assert [(one["index"], one["score"]) for one in found] == [(1, 2.0), (2, 1.0), (3, 1.0), (0, -1.0)]
    assert found[0]["document"] == "abcd"
    assert [one["index"] for one in reranking()(given, top_k=2)] == [1, 2]
    assert reranking()([given, {"query": "ab", "documents": []}], function_to_apply="sigmoid")[1] == []
    many = {"query": "a", "documents": ["b" * (i % 7 + 1) for i in range(100)]}
    scores = [one["score"] for one in reranking()(many)]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 100
    pipeline = reranking()
    pipeline(many)
    assert pipeline.tokens.places == [("documents", begin) for begin in (0, 32, 64, 96)]  # for errors


@pytest.mark.parametrize(
    "given", ["a", {"query": "a"}, {"query": "a", "documents": "b"}, {"query": 1, "documents": []}]
)
def test_other_inputs_are_refused(given: Any) -> None:
    with pytest.raises(ArgumentTypeError, match='expected {"query": a string, "documents": a list of strings}'):
        reranking()(given)


def test_errors_of_lists_name_the_input() -> None:
    given = {"query": "a", "documents": ["b", "c"]}
    with pytest.raises(ArgumentTypeError, match=r'^pipeline: inputs\[9\]: expected {"query": a string'):
        reranking()([given] * 9 + ["a"])
    pipeline = reranking()

    def encode(*given: Any, **options: Any) -> Any:
        raise InvalidArgumentError("pipeline: documents[1]: expected at most 3 tokens")

    pipeline.tokens.encode = encode
    with pytest.raises(
        InvalidArgumentError, match=r"^pipeline: inputs\[0\]: documents\[1\]: expected at most 3 tokens$"
    ):
        pipeline([given])
    with pytest.raises(InvalidArgumentError, match=r"^pipeline: documents\[1\]: expected at most 3 tokens$"):
        pipeline(given)
    with pytest.raises(InvalidArgumentError, match="^pipeline: function_to_apply: expected softmax"):
        reranking()([given], function_to_apply="max")


def test_models_with_several_labels_are_damaged() -> None:
    pipeline = make(Reranking, activation="none")
    pipeline.call = lambda method, arguments: np.zeros((1, 2), np.float32)
    with pytest.raises(InvalidFileError, match="labels: expected one, got 2"):
        pipeline({"query": "a", "documents": ["b"]})


def embed(pipeline: Any, **options: Any) -> Any:
    pipeline.call = lambda method, arguments: np.zeros((len(arguments["pairs"]), 2), np.float32)
    pipeline("text", **options)
    return pipeline.tokens.seen[-1]


def test_prompts() -> None:
    with_default = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt": "query"}
    assert embed(make(TextEmbedding, **with_default)) == "q: text"
    assert embed(make(TextEmbedding, **with_default), prompt_name="passage") == "p: text"
    assert embed(make(TextEmbedding, **with_default), prompt="") == "text"
    assert embed(make(TextEmbedding, prompts={"query": "q: "}, default_prompt=None)) == "text"
    assert embed(make(TextEmbedding)) == "text"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prompt_name": "title"}, "prompt_name: expected passage, query, got 'title'"),
        ({"prompt": 3}, "prompt: expected a string, got 3"),
        ({"prompt": "a", "prompt_name": "query"}, "expected prompt or prompt_name, got both"),
    ],
)
def test_prompts_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        embed(make(TextEmbedding, prompts={"query": "q: ", "passage": "p: "}, default_prompt=None), **options)
    with pytest.raises(InvalidArgumentError, match="expected none, as the package has no prompts, got 'x'"):
        embed(make(TextEmbedding), prompt_name="x")
