"""Prompts of text-to-image: which texts are encoded, by which tokenizers, and sections that are damaged."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from untorch.pipeline.prompts import Prompts
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidFileError

tokenizers = pytest.importorskip("tokenizers")
TEXTS = {
    "text_inputs": ["input_ids"], "max_length": 4, "fixed_length": 4, "pad_id": 0, "padding_side": "right",
    "clean_up_spaces": False,
}  # fmt: skip
LONGER = {**TEXTS, "max_length": 6, "fixed_length": 6, "text_inputs": ["input_ids", "attention_mask"]}
SECTION = {**TEXTS, "more_texts": [LONGER], "conditions": ["hidden", "pooled"]}


def make(**fields: Any) -> Prompts:
    words = {word: index for index, word in enumerate(("[UNK]", "a", "cat", "dog"))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = backend.to_str().encode()
    program: Any = SimpleNamespace(path="m.pt2", _program=SimpleNamespace(entry=lambda name: data))
    return Prompts(program, Settings({**SECTION, **fields}, "m.pt2"))


def encode(prompts: Prompts, *given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the text encoders read, and what the denoiser does."""
    read: dict[str, Any] = {}

    def call(method: str, arrays: Mapping[str, Any]) -> list[Any]:
        assert method == "encode_text"
        read.update(arrays)
        return [arrays["input_ids"].astype(np.float32), arrays["input_ids_2"][:, :1].astype(np.float32)]

    return read, prompts.encode(call, *given)


def test_each_tokenizer_has_its_length() -> None:
    read, found = encode(make(), "a cat", None, False)
    assert read["input_ids"].tolist() == [[1, 2, 0, 0]]
    assert read["input_ids_2"].tolist() == [[1, 2, 0, 0, 0, 0]]
    assert read["attention_mask_2"].tolist() == [[1, 1, 0, 0, 0, 0]]
    assert found["hidden"].tolist() == [[1, 2, 0, 0]] and found["pooled"].tolist() == [[1]]


def test_the_negative_prompt_comes_first() -> None:
    read, _ = encode(make(), "a cat", "dog", True)
    assert read["input_ids"].tolist() == [[3, 0, 0, 0], [1, 2, 0, 0]]
    read, _ = encode(make(), "a cat", None, True)
    assert read["input_ids"].tolist() == [[0, 0, 0, 0], [1, 2, 0, 0]]


def test_zeros_stand_for_no_negative_prompt_alone() -> None:
    prompts = make(zeros_without_negative_prompt=True)
    read, found = encode(prompts, "a cat", None, True)
    assert read["input_ids"].tolist() == [[1, 2, 0, 0]] and found["hidden"].tolist() == [[0, 0, 0, 0], [1, 2, 0, 0]]
    assert found["pooled"].tolist() == [[0], [1]]
    read, _ = encode(prompts, "a cat", "dog", True)
    assert len(read["input_ids"]) == 2


def test_lower_case() -> None:
    assert encode(make(), " A Cat", None, False)[0]["input_ids"].tolist() == [[0, 0, 0, 0]]
    read, _ = encode(make(lower_case=True), " A Cat", "DOG", True)
    assert read["input_ids"].tolist() == [[3, 0, 0, 0], [1, 2, 0, 0]]


def test_sections_that_are_damaged() -> None:
    for more in ([1], [TEXTS] * 3):
        with pytest.raises(InvalidFileError, match="damaged: more_texts: expected at most 2 dictionaries, got"):
            make(more_texts=more)
    with pytest.raises(InvalidFileError, match="conditions: expected list, got None"):
        make(conditions=None)
