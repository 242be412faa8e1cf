"""Completions of a model whose text is known: kinds of prompts, echo, logprobs, best_of, streams."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.serve.openai.api import ScriptRunner, events, serve
from untorch.llm import Usage
from untorch.serve.openai.answers import UsageSum


def complete(client: TestClient, prompt: Any = "ab", **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return events(answer) if fields.get("stream") else answer.json()


def texts(found: Any) -> list[tuple[int, str, str]]:
    return [(one["index"], one["text"], one["finish_reason"]) for one in found["choices"]]


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), (["ab", "c"], 2), ([64, 65], 1), ([[64], [65, 66]], 2), (["a", [65]], 2)]
)
def test_kinds_of_prompts(prompt: Any, count: int) -> None:
    with serve("Yes") as client:
        found = complete(client, prompt)
        assert texts(found) == [(index, "Yes", "stop") for index in range(count)]
        assert found["object"] == "text_completion" and found["id"].startswith("cmpl-")
        assert found["usage"]["completion_tokens"] == 4 * count
        chunks = complete(client, prompt, stream=True, stream_options={"include_usage": True})
        for index in range(count):
            own = [one["choices"][0] for one in chunks[:-1] if one["choices"][0]["index"] == index]
            assert "".join(one["text"] for one in own) == "Yes"
            assert own[-1]["finish_reason"] == "stop"
        assert {key: value for key, value in chunks[-1]["usage"].items() if "details" not in key} == {
            key: value for key, value in found["usage"].items() if "details" not in key
        }


def test_an_empty_prompt_is_the_beginning() -> None:
    with serve("Yes", bos_id=256) as client:
        assert complete(client, "")["usage"]["prompt_tokens"] == 1


def test_defaults_and_samples() -> None:
    with serve("x" * 40) as client:
        assert texts(complete(client)) == [(0, "x" * 16, "length")]
        assert texts(complete(client, min_tokens=20))[0][1] == "x" * 20
        found = complete(client, ["a", "b"], n=2, max_tokens=2)
        assert texts(found) == [(index, "xx", "length") for index in range(4)]
        found = complete(client, n=1, best_of=3, max_tokens=2)
        assert texts(found) == [(0, "xx", "length")]
        assert found["usage"]["completion_tokens"] == 6
        assert texts(complete(client, ignore_eos=True, max_tokens=45, logit_bias={"88": -100}))[0][2] == "length"


def test_echo_and_logprobs() -> None:
    with serve("Yes") as client:
        assert texts(complete(client, echo=True)) == [(0, "abYes", "stop")]
        assert texts(complete(client, [64, 65], echo=True)) == [(0, "abYes", "stop")]
        found = complete(client, logprobs=2, temperature=0)["choices"][0]["logprobs"]
        assert found["tokens"] == ["Y", "e", "s"]
        assert found["text_offset"] == [0, 1, 2]
        assert found["token_logprobs"][0] == pytest.approx(0, abs=1e-6)
        assert [len(one) for one in found["top_logprobs"]] == [2, 2, 2]
        assert complete(client, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None
        found = complete(client, "aü", logprobs=1, echo=True, temperature=0)["choices"][0]
        assert found["text"] == "aüYes"
        assert found["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xbc", "Y", "e", "s"]
        assert found["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4]
        assert found["logprobs"]["token_logprobs"][0] is None
        assert found["logprobs"]["top_logprobs"][0] is None
        found = complete(client, logprobs=0, echo=True, max_tokens=0)
        assert texts(found) == [(0, "ab", "length")]
        assert found["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
        assert found["usage"]["completion_tokens"] == 0
        chunks = complete(client, echo=True, stream=True)
        assert "".join(one["choices"][0]["text"] for one in chunks) == "abYes"
        chunks = complete(client, echo=True, stream=True, max_tokens=0)
        assert "".join(one["choices"][0]["text"] for one in chunks) == "ab"
        chunks = complete(client, logprobs=1, stream=True, temperature=0)
        lists = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"]]
        assert [offset for one in lists for offset in one["text_offset"]] == [0, 1, 2]


def test_special_tokens_and_stops() -> None:
    with serve("a<x>b.c", special=("<x>",)) as client:
        assert texts(complete(client)) == [(0, "ab.c", "stop")]
        assert texts(complete(client, skip_special_tokens=False))[0][1] == "a<x>b.c"
        assert texts(complete(client, stop="."))[0][1] == "ab"
        found = complete(client, stop_token_ids=[258], logprobs=0)["choices"][0]
        assert (found["text"], found["finish_reason"], found["logprobs"]["tokens"]) == ("a", "stop", ["a"])
        offsets = complete(client, logprobs=0)["choices"][0]["logprobs"]["text_offset"]
        assert offsets == [0, 1, 1, 2, 3]


def test_tokens_of_drafts() -> None:
    total = UsageSum()
    total.add(0, Usage(3, 20, 0, draft_tokens=9, accepted_tokens=6))
    total.add(1, Usage(3, 20, 0, draft_tokens=4, accepted_tokens=1))
    assert total.json()["completion_tokens_details"] == {
        "accepted_prediction_tokens": 7, "rejected_prediction_tokens": 6,
    }  # fmt: skip


def test_cached_tokens() -> None:
    with serve("Yes") as client:
        prompt = list(range(20))
        assert complete(client, prompt)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert complete(client, prompt)["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_priority_reaches_the_engine() -> None:
    with serve("Yes") as client:
        engine = client.app.state.engine  # type: ignore[attr-defined]
        submit, seen = engine.submit, []
        engine.submit = lambda *args, **options: (seen.append(options["priority"]), submit(*args, **options))[1]
        complete(client, priority=-3)
    assert seen == [-3]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (1.0, 0)), ({"temperature": 0.6, "top_k": 20}, (0.6, 20)), ({"do_sample": False}, (0.0, 0)),
        ({"max_new_tokens": 5}, (1.0, 0)),
    ],
)  # fmt: skip
def test_the_authors_recommendation_is_the_default(generation: dict[str, Any], expected: tuple[float, int]) -> None:
    seen = []
    with serve(runner=ScriptRunner("Yes", generation=generation)) as client:
        engine = client.app.state.engine  # type: ignore[attr-defined]
        submit = engine.submit
        engine.submit = lambda prompt, params, **options: (seen.append(params), submit(prompt, params, **options))[1]
        complete(client)
        complete(client, temperature=0.2, top_k=-1)
    assert (seen[0].temperature, seen[0].top_k) == expected
    assert (seen[1].temperature, seen[1].top_k) == (0.2, -1)
