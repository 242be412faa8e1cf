"""Lark grammars, in llguidance's dialect, for tool calls, JSON, and the thoughts that may come before them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from untorch.llm.structured import compact_schema
from untorch.serve.openai.tools.base import Tool

__all__ = ["CallGrammar", "Thoughts", "arguments", "build_grammar", "json_rule", "text"]

Thoughts = Literal["none", "possible", "open"]


@dataclass(frozen=True)
class CallGrammar:
    """How a format writes calls.

    Attributes:
        begin: The marker before each call, or before the list of them; empty: there is none.
        token: The marker as a token of the grammar, if it is a special token.
        call: What follows the marker for a tool, as a grammar.
        separator: Text between calls.
        brackets: Text around the list of calls, which then have one marker together.
        rules: More rules that calls use.
    """

    begin: str
    token: str | None
    call: Callable[[Tool], str]
    separator: str = ""
    brackets: tuple[str, str] | None = None
    rules: str = ""


def text(value: str) -> str:
    """A literal."""
    return json.dumps(value, ensure_ascii=False)


def json_rule(schema: Any) -> str:
    """A JSON value of the schema, compact, as models learnt to write calls."""
    return f"%json {json.dumps(compact_schema(schema), ensure_ascii=False)}"


def arguments(schema: Mapping[str, Any]) -> str:
    """A call's arguments: an object."""
    return json_rule({"type": "object", **schema})


def build_grammar(
    calls: CallGrammar | None,
    tools: Sequence[Tool],
    *,
    required: bool,
    many: bool,
    content: Any = None,
    thoughts: Thoughts = "none",
    token: Callable[[str], str | None] = lambda _: None,
) -> str:
    """The grammar of an answer.

    Args:
        calls: None: the answer is only content.
        tools: Those that may be called.
        required: Whether there must be a call.
        many: Whether there may be several.
        content: JSON schema of an answer without calls; None: any text, in which calls may be.
        thoughts: Whether ``<think>…</think>`` may come first; "open": the prompt has begun it.
        token: Gives an added token of the tokenizer as the grammar names it, or None.
    """
    rules: list[str] = []
    if calls is None:
        body = "content"
    else:
        rules += _call_rules(calls, tools, many)
        if required:
            body = "calls"
        elif content is not None:
            body = "(calls | content)"
        else:
            body = _free(calls, many, rules)
    if content is not None and "content" in body:
        rules.append(f"content: {json_rule(content)}")
    start = body
    if thoughts != "none":
        begin, end = token("<think>"), token("</think>")
        if end is None:
            rules.append(r"thoughts[lazy]: /(.|\n)*<\/think>/")
        else:
            rules += [f"thoughts: THOUGHTS {end}", r"THOUGHTS: /(.|\n)*/"]
        rules.append(r"SPACE: /\s{0,4}/")
        start = f"thoughts SPACE {body}"
        if thoughts == "possible":
            start = f"({begin or text('<think>')} thoughts SPACE)? {body}"
    return "%llguidance {}\n" + f"start: {start}\n" + "\n".join(rules) + "\n"


def _call_rules(calls: CallGrammar, tools: Sequence[Tool], many: bool) -> list[str]:
    rules = [f"call_{at}: {calls.call(tool)}" for at, tool in enumerate(tools)]
    rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(tools))))
    separator = f"{text(calls.separator)} " if calls.separator else ""
    begin = calls.token or (text(calls.begin) if calls.begin else "")
    if calls.brackets is not None:
        opening, closing = map(text, calls.brackets)
        rules.append(f"group: {opening} call {f'({separator}call)* ' if many else ''}{closing}")
        rules.append(f"calls: {begin} group")
    else:
        rules.append("group: call")
        rules.append(f"calls: {begin} group" + (f" ({separator}{begin} group)*" if many else ""))
    if calls.rules:
        rules.append(calls.rules)
    return rules


def _free(calls: CallGrammar, many: bool, rules: list[str]) -> str:
    """Any text; what follows a marker is a call."""
    rules.append(r"TEXT: /(.|\n)*/")
    if not calls.begin:  # calls are the whole text, which begins with a bracket
        rules.append(r"OTHER: /[^{](.|\n)*/")
        return '(calls | OTHER | "")'
    if calls.token is not None:
        rules.append(f"late: TEXT {calls.token} group")
    else:
        rules.append(f"begin[lazy]: TEXT {text(calls.begin)}")
        rules.append("late: begin group")
    return "late* TEXT" if many else "(late | TEXT)"
