"""The OpenAI API with the unmodified ``openai`` client, against uvicorn in a process without torch."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests import packages

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

# The client's types are pydantic's, whose JSON schemas of these tools have what openai warns of.
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = pathlib.Path(__file__).parent
HI = [{"role": "user", "content": "hi"}]
NOW = {"type": "function", "function": {"name": "now"}}
PLACE = {
    "type": "function",
    "function": {
        "name": "place", "strict": True,
        "parameters": {
            "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99},
                                             "side": {"type": "string", "enum": ["left", "right"]}},
            "required": ["x", "side"], "additionalProperties": False,
        },
    },
}  # fmt: skip
# A random model loves white space: it may go on for long.
NO_SPACE = {str(token): -100 for token in (188, 220, 197, 198, 201)}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    package = packages.compiled(HERE / "models.py", "tiny")
    run = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    process = subprocess.Popen(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", run, str(HERE / "server.py"), str(package)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def stats(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def idle(url: str) -> dict[str, Any]:
    """The engine's counters once nothing runs; it must happen soon."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = stats(url)
        if found["requests"] == found["finished"] and not found["running"] and not found["waiting"]:
            assert found["blocks_free"] == found["blocks"]
            return found
        time.sleep(0.05)
    raise AssertionError("the engine still works for nobody")


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 1, **fields})


def test_models(client: Any, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "org/vectors"]
    assert client.models.retrieve("org/vectors").id == "org/vectors"
    assert client.models.retrieve("tiny").object == "model"
    assert not {"torch", "transformers", "scipy", "fastapi"} & set(stats(url)["modules"])


def test_chat(client: Any) -> None:
    found = chat(client)
    [choice] = found.choices
    assert choice.finish_reason in ("length", "stop")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert found.usage.prompt_tokens == len("user: hi\nbot:")
    assert found.usage.completion_tokens <= 8
    assert chat(client, messages=[*HI, {"role": "assistant", "content": "x" * 60}, *HI]).usage.prompt_tokens == 94
    again = chat(client, messages=[*HI, {"role": "assistant", "content": "x" * 60}, *HI])
    assert again.usage.prompt_tokens_details.cached_tokens == 80


def test_seeds(client: Any) -> None:
    texts = [chat(client, seed=seed, max_tokens=16).choices[0].message.content for seed in (1, 1, 2, -5, -5)]
    assert texts[0] == texts[1]
    assert texts[3] == texts[4]
    assert len(set(texts)) == 3


def test_stream(client: Any) -> None:
    expected = chat(client, max_tokens=20)
    chunks = list(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == expected.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == expected.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens
    assert len(chunks) > 3


def test_samples_and_logprobs(client: Any) -> None:
    found = chat(client, n=3, logprobs=True, top_logprobs=4)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) == 3
    for choice in found.choices:
        assert len(choice.logprobs.content) >= 7
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 4
            assert token.top_logprobs[0].logprob >= token.logprob
        text = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert text.decode(errors="replace").replace("\ufffd", "") == choice.message.content.replace("\ufffd", "")
    best = chat(client, temperature=0, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert all(token.token == token.top_logprobs[0].token for token in best)


def test_stops_and_biases(client: Any) -> None:
    text = chat(client, max_tokens=40).choices[0].message.content
    stop = text[5]
    found = chat(client, max_tokens=40, stop=[stop]).choices[0]
    assert found.message.content == text[: text.index(stop)]
    assert found.finish_reason == "stop"
    assert chat(client, logit_bias={"64": 100}, max_tokens=5).choices[0].message.content == "aaaaa"
    penalised = chat(client, logit_bias={"64": 20}, frequency_penalty=2, presence_penalty=2, max_tokens=40)
    assert set(penalised.choices[0].message.content) != {"a"}
    extra = chat(client, max_tokens=30, temperature=2, extra_body={"top_k": 1, "min_tokens": 20, "ignore_eos": True})
    assert extra.usage.completion_tokens == 30
    greedy = chat(client, max_tokens=30, temperature=0, extra_body={"min_tokens": 20, "ignore_eos": True})
    assert extra.choices[0].message.content == greedy.choices[0].message.content


def test_json_schema(client: Any) -> None:
    class Person(pydantic.BaseModel):
        kind: Literal["cat", "dog"]
        tame: bool
        ages: list[Literal[1, 2, 3]]

    for seed in range(3):
        found = client.chat.completions.parse(
            model="tiny", messages=HI, response_format=Person, max_tokens=400, seed=seed, logit_bias=NO_SPACE
        )
        [choice] = found.choices
        assert choice.finish_reason == "stop"
        assert choice.message.parsed.kind in ("cat", "dog")
    found = chat(
        client, response_format={"type": "json_object"}, max_tokens=100, logit_bias={**NO_SPACE, "92": 100}
    )  # fmt: skip
    assert isinstance(json.loads(found.choices[0].message.content), dict)
    for structured in ({"choice": ["red", "blue"]}, {"regex": "red|blue"}):
        found = chat(client, extra_body={"structured_outputs": structured})
        assert found.choices[0].message.content in ("red", "blue")


def check_place(call: Any) -> None:
    assert (call.type, call.function.name) == ("function", "place")
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"x", "side"}
    assert 0 <= arguments["x"] <= 99 and arguments["side"] in ("left", "right")


def test_tools(client: Any) -> None:
    named = {"type": "function", "function": {"name": "place"}}
    for seed in range(3):
        [choice] = chat(client, tools=[NOW, PLACE], tool_choice=named, max_tokens=200, seed=seed).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        check_place(call)
    [choice] = chat(client, tools=[PLACE], tool_choice="required", parallel_tool_calls=False, max_tokens=200).choices
    [call] = choice.message.tool_calls
    check_place(call)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    [choice] = chat(client, tools=[NOW, PLACE], tool_choice=allowed, max_tokens=100).choices
    check_place(choice.message.tool_calls[0])
    messages = [
        *HI, choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "done"} for call in choice.message.tool_calls),
    ]  # fmt: skip
    messages[1]["tool_calls"] = messages[1]["tool_calls"][:1]
    assert (
        chat(client, messages=messages[:3], tools=[NOW, PLACE], tool_choice="none").choices[0].message.tool_calls
        is None
    )
    assert chat(client, tools=[NOW]).choices[0].message.role == "assistant"


def test_tools_as_a_stream(client: Any) -> None:
    named = {"type": "function", "function": {"name": "place"}}
    fields = {"model": "tiny", "messages": HI, "tools": [PLACE], "tool_choice": named, "max_tokens": 200, "seed": 5}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 3
    assert "".join(event.arguments_delta for event in deltas) == whole.arguments
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    check_place(choice.message.tool_calls[0])


def test_completions(client: Any) -> None:
    def complete(**fields: Any) -> Any:
        return client.completions.create(**{"model": "tiny", "prompt": "ab", "max_tokens": 5, "seed": 3, **fields})

    text = complete().choices[0].text
    assert complete(prompt=[64, 65]).choices[0].text == text
    found = complete(prompt=["ab", "ab"], n=2)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == found.choices[2].text == text
    assert complete(echo=True).choices[0].text == "ab" + text
    scored = complete(echo=True, logprobs=2, max_tokens=0).choices[0].logprobs
    assert scored.tokens == ["a", "b"]
    assert scored.token_logprobs[0] is None and scored.token_logprobs[1] < 0
    # The prompt's own logprob is what the model gives to that token.
    best = complete(prompt="a", logprobs=20, max_tokens=1, temperature=0).choices[0].logprobs
    if "b" in best.top_logprobs[0]:
        assert best.top_logprobs[0]["b"] == pytest.approx(scored.token_logprobs[1], abs=1e-4)
    assert "".join(chunk.choices[0].text for chunk in complete(stream=True)) == text
    assert complete(best_of=3).usage.completion_tokens > 5


def test_embeddings(client: Any) -> None:
    found = client.embeddings.create(model="org/vectors", input=["ab", "xyz"])  # base64, as the client asks by itself
    assert [one.embedding for one in found.data] == [[64, 65, 0], [87, 88, 89]]
    plain = client.embeddings.create(model="org/vectors", input=[1, 2, 2], encoding_format="float", dimensions=2)
    assert plain.data[0].embedding == pytest.approx([1 / 5**0.5, 2 / 5**0.5])
    assert found.usage.prompt_tokens == 5


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt"}, "NotFoundError", "model", "model_not_found"),
        ({"temperature": 5}, "BadRequestError", "temperature", "invalid_value"),
        ({"store": True}, "BadRequestError", "store", "unsupported_parameter"),
        ({"extra_body": {"best_off": 1}}, "BadRequestError", "best_off", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "BadRequestError", "messages", "context_length_exceeded"),
        ({"model": "org/vectors"}, "BadRequestError", "model", "unsupported"),
    ],
)  # fmt: skip
def test_errors(client: Any, fields: dict[str, Any], kind: str, param: str, code: str) -> None:
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind)) as raised:
            chat(client, stream=stream, **fields)
        assert (raised.value.param, raised.value.code, raised.value.type) == (param, code, "invalid_request_error")


def test_accepted_without_effect(client: Any) -> None:
    plain = chat(client).choices[0].message.content
    same = chat(
        client, user="me", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x",
        prompt_cache_key="y", modalities=["text"], verbosity="medium",
        prediction={"type": "content", "content": "x"},
    )  # fmt: skip
    assert same.choices[0].message.content == plain


LONG: dict[str, Any] = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}


def test_a_stream_that_is_left_frees_the_engine(client: Any, url: str) -> None:
    before = idle(url)["generated_tokens"]
    stream = chat(client, stream=True, n=4, **LONG)
    for _ in range(8):
        next(stream)
    stream.close()
    after = idle(url)
    assert 4 <= after["generated_tokens"] - before < 3000


def test_an_answer_that_is_not_awaited_frees_the_engine(url: str) -> None:
    before = idle(url)["generated_tokens"]

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": "tiny", "messages": HI, "n": 4, **LONG}
            task = asyncio.create_task(client.chat.completions.create(**request))
            for _ in range(200):
                await asyncio.sleep(0.02)
                if (await asyncio.to_thread(stats, url))["generated_tokens"] > before:
                    break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(leave())
    assert 4 <= idle(url)["generated_tokens"] - before < 3000


def test_too_many_requests(client: Any, url: str) -> None:
    body = {"model": "tiny", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(prompt=["x"] * 69, stream=True, **body)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as raised:
        client.completions.create(prompt=["x", "y"], **body)
    assert raised.value.code == "rate_limit_exceeded"
    assert raised.value.response.headers["retry-after"] == "1"
    stream.close()
    idle(url)
    assert chat(client).choices


def test_many_streams_at_a_time(url: str) -> None:
    """Each has the text that it has alone."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def one(at: int) -> tuple[str, int]:
                stream = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x" * (at % 8)}], max_tokens=12, temperature=0,
                    stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                )  # fmt: skip
                text, tokens = "", 0
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                return text, tokens

            alone = [await one(at) for at in range(8)]
            many = await asyncio.gather(*map(one, range(64)))
            assert many == [alone[at % 8] for at in range(64)]
            assert {tokens for _, tokens in many} == {12}

    asyncio.run(run())
    idle(url)
