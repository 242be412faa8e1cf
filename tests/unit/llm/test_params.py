"""SamplingParams: what is refused, and how."""

from __future__ import annotations

from typing import Any

import pytest

from untorch import ArgumentTypeError, InvalidArgumentError
from untorch.llm import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.samples, params.greedy, params.has_penalties, params.structure) == (1, False, False, None)
    assert params.stop == ()
    assert params.max_tokens == 16


def test_forms() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], n=2, best_of=4, temperature=0, top_k=-1, regex="a+")
    assert params.stop == ("x",)
    assert params.stop_token_ids == (1, 2)
    assert params.samples == 4
    assert params.greedy
    assert params.structure == ("regex", "a+")
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 0}, "n: expected an integer from 1 to 1024, got 0"),
        ({"n": 3, "best_of": 2}, "best_of: expected an integer from 3 to 1024, got 2"),
        ({"temperature": -0.1}, "temperature: expected a finite number from 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature: expected a finite number from 0, got nan"),
        ({"top_p": 0.0}, "top_p: expected a finite number above 0 to 1, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected a finite number above 0 to 1, got 1.5"),
        ({"min_p": 2}, "min_p: expected a finite number from 0 to 1, got 2"),
        ({"top_k": -2}, "top_k: expected an integer of -1 or more, got -2"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number above 0, got 0"),
        ({"presence_penalty": 3}, "presence_penalty: expected a finite number from -2 to 2, got 3"),
        ({"frequency_penalty": -3}, "frequency_penalty: expected a finite number from -2 to 2, got -3"),
        ({"seed": -1}, "seed: expected an integer from 0 to 18446744073709551615, got -1"),
        ({"max_tokens": 0}, "max_tokens: expected an integer of 1 or more, got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: expected at most max_tokens (4), got 5"),
        ({"logprobs": -1}, "logprobs: expected an integer of 0 or more, got -1"),
        ({"stop": ["a", ""]}, "stop: expected strings that are not empty"),
        ({"logit_bias": {3: 101}}, "logit_bias[3]: expected a number from -100 to 100, got 101"),
        (
            {"json_schema": {}, "regex": "a"},
            "expected one of json_schema, regex and grammar, got json_schema and regex",
        ),
    ],
)
def test_values(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == f"SamplingParams: {text}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": True}, "n: expected an integer from 1 to 1024, got True"),
        ({"temperature": "hot"}, "temperature: expected a finite number from 0, got 'hot'"),
        ({"stop": 3}, "stop: expected a string or a list of strings, got 3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: expected a list of token ids, got [-1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected a dictionary of numbers by token id, got {'a': 1}"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"json_schema": 3}, "json_schema: expected a dictionary or a string, got 3"),
        ({"regex": 3}, "regex: expected a string, got 3"),
    ],
)
def test_types(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == f"SamplingParams: {text}"
