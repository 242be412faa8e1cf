"""Grammars of tool calls: a model that says anything writes calls that the parser reads, and nothing else."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import byte_tokenizer
from untorch.llm.tokenizer import Tokenizer
from untorch.serve.openai.tools import FORMATS
from untorch.serve.openai.tools.base import CallArguments, CallStart, Content, Tool
from untorch.serve.openai.tools.grammar import build_grammar

llguidance = pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # not special, as Qwen's
VOCABULARY, STOP = 270, 257
PLACE = Tool(
    "place",
    {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "side": {"enum": ["left", "right"]},
                       "s": {"type": "string", "enum": ["a", "b"]}, "t": {"$ref": "#/$defs/t"}},
        "required": ["x", "side"], "additionalProperties": False, "$defs": {"t": {"type": "boolean"}},
    },
)  # fmt: skip
NOW = Tool("now")


class Tokens:
    """A tokenizer with these special tokens, and llguidance's of it."""

    def __init__(self, special: tuple[str, ...], added: tuple[str, ...]) -> None:
        inner = tokenizers.Tokenizer.from_buffer(byte_tokenizer(("<s>", "</s>", *special)))
        inner.add_tokens(list(added))
        self.tokenizer = Tokenizer(inner.to_str().encode())
        self._core = llguidance.LLTokenizer(inner.to_str(), n_vocab=VOCABULARY, eos_token=[STOP])

    def token(self, text: str) -> str | None:
        found = self.tokenizer.added_id(text)
        return None if found is None else f"<[{found}]>"

    def matcher(self, grammar: str) -> Any:
        made = llguidance.LLMatcher(self._core, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not made.is_error(), made.get_error()
        return made

    def write(self, grammar: str, seed: int, most: int = 400) -> str:
        """What random choices among the allowed tokens make."""
        made, rng, ids = self.matcher(grammar), np.random.default_rng(seed), []
        bits = np.zeros((1, -(-VOCABULARY // 32)), np.int32)
        while not made.is_stopped() and len(ids) < most:
            made.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8).ravel(), bitorder="little"))
            token = int(rng.choice(allowed))
            if token == STOP:
                break
            made.consume_token(token)
            ids.append(token)
        assert not made.is_error(), made.get_error()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def accepts(self, grammar: str, text: str) -> bool:
        made = self.matcher(grammar)
        return all(made.consume_token(token) for token in self.tokenizer.encode(text)) and bool(made.is_accepting())


@cache
def tokens(kind: str = "new") -> Tokens:
    special, added = {"new": (SPECIAL, ADDED), "old": (SPECIAL[:1], ()), "plain": ((), ())}[kind]
    return Tokens(special, added)


def read(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = FORMATS[name].parser([PLACE, NOW])
    content, calls = "", []
    for event in parser.append(text) + parser.finish():
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append([event.name, ""])
        else:
            assert isinstance(event, CallArguments)
            calls[-1][1] += event.text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("kind", ["new", "old", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_valid(name: str, kind: str) -> None:
    write = tokens(kind).write
    calls = FORMATS[name].grammar(tokens(kind).token)
    for seed in range(6):
        one = build_grammar(calls, [PLACE], required=True, many=False)
        content, [(called, arguments)] = read(name, write(one, seed))
        assert (content, called) == ("", "place")
        assert arguments["x"] in range(10) and arguments["side"] in ("left", "right")
        assert set(arguments) <= {"x", "side", "s", "t"}
        many = build_grammar(calls, [PLACE, NOW], required=True, many=True)
        content, found = read(name, write(many, seed, 3000))
        assert content == "" and found
        assert {called for called, _ in found} <= {"place", "now"}
        assert all(arguments == {} for called, arguments in found if called == "now")


def accepts(grammar: str, text: str) -> bool:
    return tokens().accepts(grammar, text)


def test_the_text_is_as_templates_show_it() -> None:
    one = build_grammar(FORMATS["hermes"].grammar(tokens().token), [PLACE], required=True, many=False)
    assert accepts(one, '<tool_call>\n{"name": "place", "arguments": {"x": 3, "side": "left"}}\n</tool_call>')
    assert not accepts(one, '<tool_call>\n{"name": "place", "arguments": {"x": 30, "side": "left"}}\n</tool_call>')
    assert not accepts(one, "Sure!")
    llama = build_grammar(FORMATS["llama3"].grammar(tokens().token), [NOW], required=True, many=True)
    assert accepts(llama, '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}')
    named = build_grammar(FORMATS["mistral"].grammar(tokens().token), [NOW], required=True, many=True)
    assert accepts(named, "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}")
    listed = build_grammar(FORMATS["mistral"].grammar(tokens("old").token), [NOW], required=True, many=True)
    assert tokens("old").accepts(
        listed, '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    )


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', '<tool_call>\n{"name": "no"'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]later"),
        ("llama3", '{"name": "now", "parameters": {}}', '{"name": "later"'),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "<tool_call>\n<function=x"),
    ],
)
def test_strict_tools_may_be_left_alone(name: str, call: str, wrong: str) -> None:
    calls = FORMATS[name].grammar(tokens().token)
    for many in (True, False):
        grammar = build_grammar(calls, [NOW], required=False, many=many)
        assert accepts(grammar, "Any text.\nAt all.")
        assert accepts(grammar, call)
        if name != "llama3":
            assert accepts(grammar, f"First text. {call}")
        assert accepts(grammar, "")
        assert not accepts(grammar, wrong)


def test_calls_or_content_of_a_schema() -> None:
    calls = FORMATS["hermes"].grammar(tokens().token)
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    grammar = build_grammar(calls, [NOW], required=False, many=False, content=schema)
    assert accepts(grammar, '{"a": null}')
    assert not accepts(grammar, '{"a":\n null}')
    assert accepts(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, "text")


@pytest.mark.parametrize("kind", ["new", "plain"])
def test_thoughts_come_first(kind: str) -> None:
    schema = {"enum": [1, 2]}
    accepts, find = tokens(kind).accepts, tokens(kind).token
    possible = build_grammar(
        None, [], required=False, many=False, content=schema, thoughts="possible", token=find
    )  # fmt: skip
    assert accepts(possible, "<think>\nWell, 1/2 </thin\n</think>\n\n1")
    assert accepts(possible, "2")
    assert not accepts(possible, "<think>2")
    begun = build_grammar(None, [], required=False, many=False, content=schema, thoughts="open", token=find)
    assert accepts(begun, "Well</think>2")
    assert not accepts(begun, "2")
