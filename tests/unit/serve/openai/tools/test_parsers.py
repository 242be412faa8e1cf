"""Parsers of tool calls: each text, cut at every position, gives the same content and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from untorch.serve.openai.tools import FORMATS, find_format, new_call_id
from untorch.serve.openai.tools.base import CallArguments, CallStart, Content, Tool, overlap

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "object"},
            "exact": {"type": "boolean"}, "free": {},
        },
        "required": ["city"],
    },
)  # fmt: skip
TOOLS = [WEATHER, Tool("now")]

PARIS = '{"city": "Paris"}'
Calls = list[tuple[str, str]]

HERMES: list[tuple[str, str, Calls]] = [
    ("Hello there.", "Hello there.", []),
    ("  spaces stay \n", "  spaces stay \n", []),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [("weather", PARIS)]),
    ('Let me see.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', "Let me see.", [("now", "{}")]),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n<tool_call>\n'
        '{"arguments": {"a": [1, {"b": "}"}]}, "name": "now"}\n</tool_call>',
        "", [("weather", PARIS), ("now", '{"a": [1, {"b": "}"}]}')],
    ),
    ('<tool_call>{"name": "now"}</tool_call> Done.', " Done.", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"name": "w", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("w", '{"a": 1}')]),
    ('<tool_call>{"name": "w", "parameters": {"a": "\\"}<tool_call>"}}', "", [("w", '{"a": "\\"}<tool_call>"}')]),
    ('<tool_call>{"id": 7, "x": [true], "name": "w", "arguments": {}}</tool_call>', "", [("w", "{}")]),
    ("<tool_call> no JSON </tool_call>", "<tool_call> no JSON </tool_call>", []),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ('a <tool_call>{"arguments": {}}</tool_call>', 'a <tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Pa', "", [("weather", '{"city": "Pa')]),
    ('<tool_call>{"name": "weather"', "", [("weather", "")]),
    ('So: <tool_call>{"name": "weather", "argu', "So:", [("weather", "")]),
    ('<tool_call>{"name": "weather", "arguments": ', "", [("weather", "")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "now"', "", [("now", '{"a": 1}')]),
    ("if a <tool b", "if a <tool b", []),
    ("ends with <tool_ca", "ends with <tool_ca", []),
    ('<tool_call>{"name": "now", "arguments": {}}</tool', "", [("now", "{}")]),
]  # fmt: skip
LLAMA: list[tuple[str, str, Calls]] = [
    ("Hello there.", "Hello there.", []),
    ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [("weather", PARIS)]),
    ('\n{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', "", [("weather", PARIS)]),
    ('<|python_tag|>{"name": "other", "parameters": {"x": 1.5}}', "", [("other", '{"x": 1.5}')]),
    ('I look. <|python_tag|>{"name": "now", "parameters": {}}', "I look.", [("now", "{}")]),
    (
        '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        "", [("weather", PARIS), ("now", "{}")],
    ),
    (
        '<|python_tag|>{"name": "a", "parameters": {}}<|python_tag|>{"name": "b", "parameters": {}};\n',
        "", [("a", "{}"), ("b", "{}")],
    ),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "weather"}', '{"name": "weather"}', []),
    ('{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    ("{x} is a set", "{x} is a set", []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ('{"name": "weather", "parameters": {"city": "Paris"}} as you see', " as you see", [("weather", PARIS)]),
    ("<|python", "<|python", []),
    ('{"name": "weather", "parameters": {"ci', "", [("weather", '{"ci')]),
    ('{"name": "weather", "param', "", [("weather", "")]),
    ('{"name": "Bob", "param', '{"name": "Bob", "param', []),
    ("  ", "  ", []),
]  # fmt: skip
MISTRAL: list[tuple[str, str, Calls]] = [
    ("Hello [you].", "Hello [you].", []),
    ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', "", [("weather", PARIS)]),
    (
        'Well.\n[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abc"}, '
        '{"name": "now", "arguments": {}}]',
        "Well.", [("weather", PARIS), ("now", "{}")],
    ),
    ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", [("weather", PARIS)]),
    ('[TOOL_CALLS]weather{"city": "Paris"}', "", [("weather", PARIS)]),
    (
        'Hm [TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        "Hm", [("weather", PARIS), ("now", "{}")],
    ),
    ('[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    ("[TOOL_CALLS] nothing!", "[TOOL_CALLS] nothing!", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ("[TOOL_CALLS]a b{", "[TOOL_CALLS]a b{", []),
    ("[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
    ("[TOOL_CALLS]weather[ARGS]", "", [("weather", "")]),
    ('[TOOL_CALLS][{"name": "now", "ar', "", [("now", "")]),
    ('[TOOL_CALLS][{"name": "now", "arguments": {"a": [', "", [("now", '{"a": [')]),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}}, ', "", [("now", "{}")]),
]  # fmt: skip
QWEN: list[tuple[str, str, Calls]] = [
    ("Hello there.", "Hello there.", []),
    (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "", [("weather", PARIS)],
    ),
    (
        'Yes.\n<tool_call>\n<function=weather>\n<parameter=city>\nSt. "X"\n\tline\n\n</parameter>\n<parameter=days>\n3\n'
        '</parameter>\n<parameter=units>\n{"a": [1]}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n'
        "<parameter=free>\nsome text\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "Yes.",
        [("weather", json.dumps({"city": 'St. "X"\n\tline\n', "days": 3, "units": {"a": [1]}, "exact": True,
                                 "free": "some text"})), ("now", "{}")],
    ),
    ("<tool_call><function=f><parameter=x>a < b</parameter></function></tool_call>", "", [("f", '{"x": "a < b"}')]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter>\n</function>", "", [("weather", '{"city": ""}')]),
    ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ("<tool_call>\n<function=", "<tool_call>\n<function=", []),
    ("<tool_call><function=now>", "", [("now", "{")]),
    ("<tool_call><function=weather><parameter=city>\nPa", "", [("weather", '{"city": "Pa')]),
    ("<tool_call><function=now>what</function></tool_call>", "what</function></tool_call>", [("now", "{}")]),
]  # fmt: skip

CASES = [
    pytest.param(name, *case, id=f"{name}-{at}")
    for name, cases in (("hermes", HERMES), ("llama3", LLAMA), ("mistral", MISTRAL), ("qwen3_coder", QWEN))
    for at, case in enumerate(cases)
]


def parse(name: str, pieces: list[str]) -> tuple[str, Calls]:
    parser = FORMATS[name].parser(TOOLS)
    content, calls = "", []
    for event in [event for piece in pieces for event in parser.append(piece)] + parser.finish():
        if isinstance(event, Content):
            assert event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_every_cut(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(name, [text]) == (content, calls)
    assert parse(name, list(text)) == (content, calls)
    for at in range(1, len(text)):
        assert parse(name, [text[:at], text[at:]]) == (content, calls), text[:at]


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', '{"city": "Par'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Par', '{"city": "Par'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Par', '{"city": "Par'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Par', '{"city": "Par'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nPar", '{"city": "Par'),
    ],
)
def test_arguments_come_before_they_are_whole(name: str, text: str, first: str) -> None:
    events = FORMATS[name].parser(TOOLS).append(text)
    assert events[0] == CallStart(0, "weather")
    assert "".join(event.text for event in events[1:] if isinstance(event, CallArguments)) == first


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", 3), ("x y", "x y"), ("None", None), ("false", False), ('"quoted"', "quoted"), ("[1", "[1")],
)
def test_values_of_qwen_follow_the_schema(value: str, expected: Any) -> None:
    text = f"<tool_call><function=weather><parameter=days>\n{value}\n</parameter></function></tool_call>"
    assert json.loads(parse("qwen3_coder", [text])[1][0][1]) == {"days": expected}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("tools <tool_call>\n<function=x>", "qwen3_coder"),
        ("tools <tool_call>\n{{ }}", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("<|start_header_id|>{{ 'ipython' }}", "llama3"),
        ("<|start_header_id|>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_seen_from_the_template(template: str, expected: str | None) -> None:
    assert find_format(template) == expected


def test_the_format_is_seen_from_the_tokenizer() -> None:
    for token, expected in (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3")):
        assert find_format("{{ tools }}", token.__eq__) == expected
        assert find_format("<|python_tag|>", token.__eq__) == "llama3"


def test_ids_of_calls() -> None:
    assert len(new_call_id(FORMATS["mistral"])) == 9
    assert new_call_id(FORMATS["mistral"]).isalnum()
    assert new_call_id(FORMATS["hermes"]).startswith("call_")
    assert new_call_id(FORMATS["hermes"]) != new_call_id(FORMATS["hermes"])


@pytest.mark.parametrize(("text", "size"), [("ab<to", 3), ("<tool>", 0), ("<", 1), ("", 0), ("<<to", 3)])
def test_overlap(text: str, size: int) -> None:
    assert overlap(text, "<tool_call>") == size


PIECES = [
    "<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]",
    "[ARGS]", "<|python_tag|>", '{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {"a": "}"}}', "[", "]",
    "{", "}", '"', "\\", ",", ";", " ", "\n", "a", ":", '"name"', '"weather"', "<", "now",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(pieces=strategies.lists(strategies.sampled_from(PIECES), max_size=14))
def test_texts_of_markers_in_any_order(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parse(name, [text])
    assert parse(name, pieces) == whole
    assert parse(name, list(text)) == whole
    if not whole[1]:
        assert whole[0] == text
