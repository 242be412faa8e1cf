"""SamplingParams: what is refused, and how."""

from __future__ import annotations

from typing import Any

import numpy as np
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


def test_numbers_of_numpy() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_p=np.float64(0.25), max_tokens=np.int32(4),
        stop_token_ids=[np.int64(3)], logit_bias={np.int64(5): np.float32(2)},
    )  # fmt: skip
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (2, 0.5, 0.25, 4)
    assert (params.stop_token_ids, params.logit_bias) == ((3,), {5: 2.0})
    assert {type(params.n), type(params.max_tokens), type(params.stop_token_ids[0])} == {int}
    assert type(params.temperature) is float
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 0}, "n: expected an integer from 1 to 1024, got 0"),
        ({"n": 3, "best_of": 2}, "best_of: expected an integer from 3 to 1024, got 2"),
        ({"temperature": -0.1}, "temperature: expected a finite number from 0 to 3.4e+38, got -0.1"),
        ({"temperature": float("nan")}, "temperature: expected a finite number from 0 to 3.4e+38, got nan"),
        ({"temperature": 1e39}, "temperature: expected a finite number from 0 to 3.4e+38, got 1e+39"),
        ({"top_p": 0.0}, "top_p: expected a finite number above 0 to 1, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected a finite number above 0 to 1, got 1.5"),
        ({"min_p": 2}, "min_p: expected a finite number from 0 to 1, got 2"),
        ({"top_k": -2}, "top_k: expected an integer of -1 or more, got -2"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number from 1e-30 to 1e+30, got 0"),
        (
            {"repetition_penalty": 1e-300},
            "repetition_penalty: expected a finite number from 1e-30 to 1e+30, got 1e-300",
        ),
        ({"repetition_penalty": 1e300}, "repetition_penalty: expected a finite number from 1e-30 to 1e+30, got 1e+300"),
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
        ({"temperature": "hot"}, "temperature: expected a finite number from 0 to 3.4e+38, got 'hot'"),
        ({"max_tokens": np.bool_(True)}, f"max_tokens: expected an integer of 1 or more, got {np.bool_(True)!r}"),
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
