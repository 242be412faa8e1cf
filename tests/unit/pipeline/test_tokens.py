"""Texts as padded ids: truncation, padding on both sides, fixed lengths, and what is refused."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from untorch.pipeline.settings import Settings
from untorch.pipeline.tokens import Tokens
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

tokenizers = pytest.importorskip("tokenizers")


def make(data: bytes | None = None, **changes: Any) -> Tokens:
    if data is None:
        words = {"[PAD]": 9, "a": 1, "b": 2, "c": 3, "d": 4}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        data = backend.to_str().encode()
    values = {
        "max_length": 3, "text_inputs": ["input_ids", "attention_mask"], "pad_id": 9, "padding_side": "right",
        "clean_up_spaces": False,
    }  # fmt: skip
    program: Any = SimpleNamespace(path="m.pt2", _program=SimpleNamespace(entry=lambda name: data))
    return Tokens(program, Settings(values | changes, "m.pt2"))


def test_padding() -> None:
    tokens = make()
    arrays = tokens.arrays(tokens.encode(["a b", "c"]))
    assert arrays["input_ids"].tolist() == [[1, 2], [3, 9]]
    assert arrays["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert tokens.arrays(tokens.encode(["a"]), 2)["input_ids"].tolist() == [[1, 9]]
    assert tokens.arrays(tokens.encode(["a b c"]), 2)["input_ids"].tolist() == [[1, 2, 3]]  # as many as are read
    left = make(padding_side="left")
    encodings = left.encode(["a b", "c"])
    assert left.arrays(encodings)["input_ids"].tolist() == [[1, 2], [9, 3]]
    assert [row.tolist() for row in left.rows(left.arrays(encodings)["input_ids"], encodings)] == [[1, 2], [3]]
    fixed = make(fixed_length=3)
    assert fixed.arrays(fixed.encode(["a b c d", "c"]))["input_ids"].tolist() == [[1, 2, 3], [3, 9, 9]]


def test_truncation() -> None:
    tokens = make()
    with pytest.raises(InvalidArgumentError, match=r"inputs\[1\]: expected at most 3 tokens, got 4: cut the text"):
        tokens.encode(["a", "a b c d"])
    assert [one.ids for one in tokens.encode(["a b c d"], truncation=True)] == [[1, 2, 3]]
    with pytest.raises(InvalidArgumentError, match="truncation: expected True or False"):
        tokens.encode(["a"], truncation=1)  # type: ignore[arg-type]


def test_truncation_is_that_of_the_call() -> None:
    """Calls of several threads, of which some truncate."""
    tokens, wrong = make(), []

    def encode(truncation: bool) -> None:
        for _ in range(300):
            try:
                found = len(tokens.encode(["a b c d"], truncation)[0].ids)
            except InvalidArgumentError:
                found = 4
            if found != (3 if truncation else 4):
                wrong.append((truncation, found))

    threads = [threading.Thread(target=encode, args=(kind,)) for kind in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_lone_surrogates_are_refused() -> None:
    tokens = make()
    text = "expected Unicode text, got a lone surrogate, '\\ud83d', at 2: decode bytes with errors=\"replace\""
    for given, place in (
        (["a \ud83d"], "inputs"),
        (["a", "a \ud83d", "\ud800"], "inputs[1]"),
        ([{"text": "b", "text_pair": "a \ud83d"}], "inputs"),
    ):
        for truncation in (False, True):
            with pytest.raises(InvalidArgumentError) as caught:
                tokens.encode(given, truncation)
            assert str(caught.value) == f"pipeline: {place}: {text}"
    # Characters that tokenizers take as they are.
    assert len(tokens.encode(["", "   ", "\0", "\U0001f600 a", "a\0b"])) == 5


def test_the_argument_that_errors_name() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^pipeline: documents\[33\]: expected at most 3 tokens, got 4: cut"
    ):
        make().encode(["a", "a b c d"], name="documents", first=32)
    with pytest.raises(
        InvalidArgumentError, match=r"^pipeline: labels\[0\]: expected at most 3 tokens, got 4: shorten$"
    ):
        make().encode(["a b c d"], name="labels", advice="shorten")
    with pytest.raises(ArgumentTypeError, match=r"^pipeline: inputs\[1\]: expected a string, .*, got NoneType None"):
        make().encode(["a", None])


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r'expected a string, \{"text"'):
        make().encode([3])
    with pytest.raises(InvalidFileError, match="tokenizer.json is damaged"):
        make(b"{}")
    with pytest.raises(InvalidFileError, match="text_inputs: unknown 'pixels'"):
        make(text_inputs=["pixels"])
