"""Errors of inputs in lists and iterators say which input it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from untorch.pipeline.base import Pipeline, numbered, renumbered
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError


class Lengths(Pipeline):
    """A text's length. "?" is refused with its place in the batch, numbers without a place."""

    task = "lengths"

    def __init__(self) -> None:
        pass

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        for index, text in enumerate(inputs):
            if text == "?":
                raise InvalidArgumentError(f"pipeline: inputs[{index}]: expected another text")
            if not isinstance(text, str):
                raise ArgumentTypeError("pipeline: inputs: expected a string")
        return [len(text) for text in inputs]


def test_places_are_those_in_the_list() -> None:
    texts = ["a"] * 10 + ["?"]
    for given in (texts, tuple(texts)):
        with pytest.raises(InvalidArgumentError) as caught:
            Lengths()(given, batch_size=4)
        assert str(caught.value) == "pipeline: inputs[10]: expected another text"
    with pytest.raises(InvalidArgumentError, match=r"^pipeline: inputs\[1\]: expected another text$"):
        Lengths()(["a", "?"])
    assert Lengths()([]) == []


def test_places_are_those_in_the_iterator() -> None:
    found = Lengths()((text for text in ["a"] * 10 + ["?"]), batch_size=4)
    assert [next(found) for _ in range(8)] == [1] * 8
    with pytest.raises(InvalidArgumentError, match=r"^pipeline: inputs\[10\]: expected another text$"):
        next(found)


def test_a_batch_of_one_has_its_place() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^pipeline: inputs\[4\]: expected a string$"):
        Lengths()([*"abcd", 7], batch_size=4)
    with pytest.raises(ArgumentTypeError, match="^pipeline: inputs: expected a string$"):
        Lengths()(7)


@pytest.mark.parametrize(
    ("text", "index", "begins", "expected"),
    [
        ("pipeline: inputs: expected x", None, ("",), "pipeline: inputs: expected x"),
        ("pipeline: inputs: expected x", 3, ("",), "pipeline: inputs[3]: expected x"),
        ("audio: expected x", 3, ("",), "pipeline: inputs[3]: audio: expected x"),
        ("audio: expected x", 3, ("audio: ",), "pipeline: inputs[3]: audio: expected x"),
        ("transcribe: language: unknown", 3, ("audio: ",), "transcribe: language: unknown"),
    ],
)
def test_numbered(text: str, index: int | None, begins: tuple[str, ...], expected: str) -> None:
    cause = ValueError("cause")
    with pytest.raises(ArgumentTypeError) as caught, numbered(index, begins):
        raise ArgumentTypeError(text) from cause
    assert str(caught.value) == expected
    assert caught.value.__cause__ is cause


def test_other_errors_stay() -> None:
    for error in (InvalidArgumentError("pipeline: top_k: expected 1"), KeyError("a"), FileNotFoundError("inputs[1]")):
        with pytest.raises(type(error)) as caught, renumbered(8, 4), numbered(None):
            raise error
        assert caught.value is error
