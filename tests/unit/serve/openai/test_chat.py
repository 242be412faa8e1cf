"""Chats with a model whose text is known: messages, tools, thoughts, logprobs, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.serve.openai.api import TEMPLATE, TOOLS_TEMPLATE, ScriptRunner, chat, serve, stream
from untorch.serve.openai import Options
from untorch.serve.openai.chat_choice import message_of

NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}
PLACE = {
    "type": "function",
    "function": {"name": "place", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "place", "arguments": {"x": 3}}\n</tool_call>'
TWO_CALLS = f'Now.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def prompt(messages: list[Any], template: str = TEMPLATE, **fields: Any) -> str:
    """What the template made of the messages."""
    runner = ScriptRunner("x", template)
    seen: list[int] = []
    with serve(runner=runner) as client:
        engine = client.app.state.engine  # type: ignore[attr-defined]
        submit = engine.submit
        engine.submit = lambda ids, *args, **options: (seen.extend(ids), submit(ids, *args, **options))[1]
        chat(client, messages=messages, **fields)
        assert engine.tokenizer is not None
        text: str = engine.tokenizer.decode(seen)
        return text


def test_an_answer() -> None:
    with serve("Hello!") as client:
        found = chat(client)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert found["model"] == "m"
    assert found["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello!", "refusal": None}, "logprobs": None,
         "finish_reason": "stop"}
    ]  # fmt: skip
    assert found["usage"] == {
        "prompt_tokens": 13, "completion_tokens": 7, "total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_stream() -> None:
    with serve("Grüße!") as client:
        found = stream(client, stream_options={"include_usage": True})
        plain = stream(client)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found[:-1]) == "Grüße!"
    assert [one["choices"][0]["finish_reason"] for one in found[-3:-1]] == [None, "stop"]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 9
    assert {one["object"] for one in found} == {"chat.completion.chunk"}
    assert len({(one["id"], one["created"]) for one in found}) == 1
    assert all(one["usage"] is None for one in found[:-1])
    assert all("usage" not in one for one in plain)


def test_ends_and_samples() -> None:
    with serve("Hello, you") as client:
        assert chat(client, max_tokens=3)["choices"][0]["finish_reason"] == "length"
        assert chat(client, max_completion_tokens=3)["choices"][0]["message"]["content"] == "Hel"
        found = chat(client, stop=[",", "x"])
        assert found["choices"][0]["message"]["content"] == "Hello"
        assert found["choices"][0]["finish_reason"] == "stop"
        assert chat(client, stop=",", include_stop_str_in_output=True)["choices"][0]["message"]["content"] == "Hello,"
        found = chat(client, n=3, temperature=0)
        assert [(one["index"], one["message"]["content"]) for one in found["choices"]] == [
            (i, "Hello, you") for i in range(3)
        ]
        assert found["usage"]["completion_tokens"] == 33
        chunks = stream(client, n=3, temperature=0, stream_options={"include_usage": True})
        for index in range(3):
            own = [one["choices"][0] for one in chunks[:-1] if one["choices"][0]["index"] == index]
            assert "".join(one["delta"].get("content", "") for one in own) == "Hello, you"
            assert own[-1]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == 33
        assert chunks[-1]["usage"]["prompt_tokens"] == 13


def test_logprobs() -> None:
    with serve("ü!") as client:
        found = chat(client, logprobs=True, top_logprobs=2, temperature=0)["choices"][0]["logprobs"]
        assert [one["token"] for one in found["content"]] == ["bytes:\\xc3", "bytes:\\xbc", "!"]
        assert [one["bytes"] for one in found["content"]] == [[0xC3], [0xBC], [33]]
        first = found["content"][0]
        assert first["logprob"] == first["top_logprobs"][0]["logprob"] == pytest.approx(0, abs=1e-6)
        assert [len(one["top_logprobs"]) for one in found["content"]] == [2, 2, 2]
        assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        chunks = [one["choices"][0] for one in stream(client, logprobs=True, top_logprobs=2, temperature=0)]
        streamed = [token for one in chunks if one["logprobs"] for token in one["logprobs"]["content"]]
        assert streamed == found["content"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "developer", "content": "be brief"}], "system: be brief\nbot:"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "user: a\nb\nbot:"),
        (
            [{"role": "user", "content": "a", "name": "Ann"},
             {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None, "tool_calls": None,
              "function_call": None}],
            "user: a\nassistant: b\nbot:",
        ),
        ([{"role": "assistant", "content": None, "refusal": "no"}], "assistant: no\nbot:"),
    ],
)  # fmt: skip
def test_messages(messages: list[Any], expected: str) -> None:
    assert prompt(messages) == expected


def test_messages_of_tools() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }}) {% endfor %}{% elif m.role == 'tool' %}{{ m.name }}[{{ m.tool_call_id }}]="
        "{{ m.content }}{% else %}{{ m.role }} {% endif %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "place", "arguments": '{"x": 3}'}}
    messages = [
        {"role": "developer", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [call, {"id": "c2", "type": "function", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "left"}]},
    ]
    assert prompt(messages, template) == 'system place({"x": 3}) f({}) place[c1]=left'
    assert prompt(messages, template + "{# developer #}").startswith("developer ")


def test_variables_of_the_template() -> None:
    template = "{{ enable_thinking }} {{ x }}"
    user = [{"role": "user", "content": "x"}]
    assert prompt(user, template, chat_template_kwargs={"x": 5, "enable_thinking": True}) == "True 5"
    assert prompt(user, template, reasoning_effort="none") == "False "
    assert prompt(user, template, reasoning_effort="high") == "True "
    assert prompt(user, "{{ reasoning_effort }}", reasoning_effort="low") == "low"


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("auto", ["now", "place"]), (None, ["now", "place"]), ("none", []),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [PLACE]}}, ["place"]),
    ],
)  # fmt: skip
def test_which_tools_the_model_sees(choice: Any, shown: list[str]) -> None:
    if isinstance(choice, dict):
        choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "place"}}]
    template = "{{ tools | map(attribute='function.name') | join(' ') if tools }}{# <tool_call> #}"
    found = prompt([{"role": "user", "content": "x"}], template + "!", tools=[NOW, PLACE], tool_choice=choice)
    assert found == " ".join(shown) + "!"


def test_definitions_of_tools_are_whole() -> None:
    template = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{# <tool_call> #}"
    strict = {"type": "function", "function": {**PLACE["function"], "strict": True, "description": None}}  # type: ignore[dict-item]
    found = prompt([{"role": "user", "content": "x"}], template, tools=[strict, NOW]).splitlines()
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert [json.loads(line) for line in found] == [
        {"type": "function", "function": {**PLACE["function"], "description": ""}},  # type: ignore[dict-item]
        {"type": "function", "function": {**NOW["function"], "parameters": empty}},  # type: ignore[dict-item]
    ]
    assert found[0].startswith('{"type": "function", "function": {"name": "place", "parameters": ')


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(one["type"] == "function" and one["id"].startswith("call_") for one in message.get("tool_calls", ()))
    return [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]


def test_calls() -> None:
    with serve(TWO_CALLS, template=TOOLS_TEMPLATE) as client:
        [choice] = chat(client, tools=[NOW, PLACE])["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Now."
        assert calls(choice["message"]) == [("place", '{"x": 3}'), ("now", "{}")]
        assert len({one["id"] for one in choice["message"]["tool_calls"]}) == 2
        [choice] = chat(client, tools=[NOW, PLACE], parallel_tool_calls=False)["choices"]
        assert calls(choice["message"]) == [("place", '{"x": 3}')]
        [choice] = chat(client, tools=[NOW, PLACE], tool_choice="none")["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (TWO_CALLS, "stop")
        [choice] = chat(client, tools=[NOW, PLACE], max_tokens=60)["choices"]
        assert choice["finish_reason"] == "length"
        assert calls(choice["message"]) == [("place", '{"x": 3}')]
    with serve("Just text.", template=TOOLS_TEMPLATE) as client:
        [choice] = chat(client, tools=[NOW])["choices"]
        assert (choice["message"], choice["finish_reason"]) == (
            {"role": "assistant", "content": "Just text.", "refusal": None}, "stop"
        )  # fmt: skip


def test_calls_as_a_stream() -> None:
    with serve(TWO_CALLS, template=TOOLS_TEMPLATE) as client:
        chunks = [one["choices"][0] for one in stream(client, tools=[NOW, PLACE], logprobs=True)]
    deltas = [one["delta"] for one in chunks]
    first = next(one["tool_calls"][0] for one in deltas if "tool_calls" in one)
    assert first["function"] == {"name": "place", "arguments": ""}
    assert list(first) == ["index", "id", "type", "function"]
    pieces = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
    assert [one["function"]["arguments"] for one in pieces if one["index"] == 0][:4] == ["", "{", '"', "x"]
    message = message_of(deltas)
    assert message["content"] == "Now."
    assert calls(message) == [("place", '{"x": 3}'), ("now", "{}")]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    tokens = "".join(token["token"] for one in chunks if one["logprobs"] for token in one["logprobs"]["content"])
    assert tokens == TWO_CALLS


@pytest.mark.parametrize(
    ("template", "special", "text", "expected"),
    [
        ("{{ tools }}[TOOL_CALLS]", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', ("now", "{}")),
        ("{{ tools }}<|python_tag|>", "<|python_tag|>", '<|python_tag|>{"name": "now", "parameters": {}}', ("now", "{}")),
        ("{{ tools }}<tool_call><function=", "<s>",
         "<tool_call>\n<function=place>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>", ("place", '{"x": 3}')),
    ],
)  # fmt: skip
def test_other_formats(template: str, special: str, text: str, expected: tuple[str, str]) -> None:
    with serve(text, template=template, special=(special,)) as client:
        [choice] = chat(client, tools=[NOW, PLACE])["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == expected
    assert (len(call["id"]) == 9) == ("[TOOL_CALLS]" in template)
    assert choice["message"]["content"] is None


def test_the_format_may_be_given() -> None:
    with serve(CALL, template="{{ tools }}[TOOL_CALLS]", options=Options(tool_format={"m": "hermes"})) as client:
        assert calls(chat(client, tools=[PLACE])["choices"][0]["message"]) == [("place", '{"x": 3}')]


THOUGHTS = TEMPLATE + "{# <think> #}"


@pytest.mark.parametrize(
    ("template", "text", "thought", "content"),
    [
        (THOUGHTS, "<think>\nWell …\n</think>\n\nYes.", "Well …", "Yes."),
        (THOUGHTS, "<think>\n\n</think>\n\nYes.", None, "Yes."),
        (THOUGHTS, "Yes <think>no</think>.", None, "Yes <think>no</think>."),
        (THOUGHTS, "<think> and so on", "and so on", None),
        (THOUGHTS, "<thin", None, "<thin"),
        (TEMPLATE + "<think>\n", "Well</think>Yes.", "Well", "Yes."),
        (TEMPLATE + "<think>\n\n</think>\n\n", "Yes.", None, "Yes."),
        (TEMPLATE, "<think>Well</think>Yes.", None, "<think>Well</think>Yes."),
    ],
)
def test_thoughts(template: str, text: str, thought: str | None, content: str | None) -> None:
    with serve(text, template=template) as client:
        message = chat(client)["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, content)
        streamed = message_of([one["choices"][0]["delta"] for one in stream(client)])
        assert streamed == message


def test_thoughts_may_be_switched() -> None:
    with serve("<think>a</think>b", options=Options(reasoning=True)) as client:
        assert chat(client)["choices"][0]["message"]["reasoning_content"] == "a"
    with serve("<think>a</think>b", template=THOUGHTS, options=Options(reasoning=False)) as client:
        assert chat(client)["choices"][0]["message"]["content"] == "<think>a</think>b"


def test_calls_behind_thoughts() -> None:
    with serve(f"<think>{CALL}</think>\n{CALL}", template=TOOLS_TEMPLATE + "{# <think> #}") as client:
        message = chat(client, tools=[PLACE])["choices"][0]["message"]
    assert message["reasoning_content"] == CALL
    assert calls(message) == [("place", '{"x": 3}')]


def test_answers_that_are_forced() -> None:
    """The model wants to say a text over and over; the grammar lets it choose only what fits."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [7, 8]}}, "required": ["a"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    with serve("z", template=TOOLS_TEMPLATE) as client:
        text = chat(client, response_format=given, seed=1)["choices"][0]["message"]["content"]
        assert json.loads(text)["a"] in (7, 8)
        closing = {str(client.app.state.engine.tokenizer.encode("}")[0]): 100}  # type: ignore[attr-defined]
        [answer] = chat(client, response_format={"type": "json_object"}, logit_bias=closing)["choices"]
        assert (json.loads(answer["message"]["content"]), answer["finish_reason"]) == ({}, "stop")
        for choice, names in (
            ("required", {"now", "place"}),
            ({"type": "function", "function": {"name": "now"}}, {"now"}),
            ({"type": "allowed_tools", "allowed_tools": {
                "mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}}, {"now"}),
        ):  # fmt: skip
            [answer] = chat(client, tools=[NOW, PLACE], tool_choice=choice, max_tokens=200, seed=1)["choices"]
            assert answer["finish_reason"] in ("tool_calls", "length")
            assert {name for name, _ in calls(answer["message"])} <= names
            assert answer["message"]["content"] is None
        assert calls(answer["message"])[0] == ("now", "{}")
        [answer] = chat(client, tools=[strict], max_tokens=5)["choices"]
        assert answer["message"]["content"].startswith("z")
        for structured, texts in (({"choice": ["red", "blue"]}, ("red", "blue")), ({"regex": "a{3}"}, ("aaa",))):
            message = chat(client, structured_outputs=structured)["choices"][0]["message"]
            assert message["content"] in texts
    with serve("z", template=THOUGHTS) as client:
        thinks = client.app.state.engine.tokenizer.encode("<")[0]  # type: ignore[attr-defined]
        message = chat(client, response_format=given, logit_bias={thinks: -100})["choices"][0]["message"]
        assert json.loads(message["content"])["a"] in (7, 8)
        [answer] = chat(client, response_format=given, logit_bias={thinks: 100}, max_tokens=20)["choices"]
        assert answer["message"]["reasoning_content"] is not None and answer["message"]["content"] is None
