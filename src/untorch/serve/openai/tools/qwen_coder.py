"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from untorch.serve.openai.tools.base import Tool, ToolParser, overlap
from untorch.serve.openai.tools.grammar import CallGrammar, json_rule, text

__all__ = ["QwenCoderParser", "qwen_coder_grammar"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]{1,200}")


class QwenCoderParser(ToolParser):
    """Values become JSON by the types in the tool's schema; texts are given out as they come."""

    _state: Literal["text", "function", "parameters", "value", "closing"] = "text"
    _before = ""  # of a call that may prove to be none
    _tool: Tool | None = None
    _count = 0  # of parameters
    _key = ""
    _is_text = _begun = False

    def _step(self, final: bool) -> bool:
        if self._state == "text":
            if not self._text_until(_BEGIN, final):
                return False
            self._state, self._before = "function", _BEGIN
            return True
        if self._state == "value":
            return self._value(final)
        rest = self._buffer.lstrip()
        if self._state == "closing":
            if rest.startswith(_END):
                self._buffer = rest[len(_END) :]
            elif _END.startswith(rest):
                if not final:
                    return False
                self._buffer = ""
            self._state = "text"
            return True
        if self._state == "function":
            name = self._tag(rest, _FUNCTION, final)
            if name is None:
                return False
            if not name:
                self._end()
                self._state = "text"
                return True
            self._tool = self.tools.get(name)
            self._start(name)
            self._arguments("{")
            self._state, self._before, self._count = "parameters", "", 0
            return True
        if rest.startswith(_FUNCTION_END):
            self._buffer = rest[len(_FUNCTION_END) :]
            self._arguments("}")
            self._state = "closing"
            return True
        if not final and _FUNCTION_END.startswith(rest):
            return False
        name = self._tag(rest, _PARAMETER, final)
        if name is None:
            return False
        if not name:  # what the call has stays
            self._arguments("}")
            self._state = "closing"
            return True
        self._key, self._begun = name, False
        self._is_text = _schema(self._tool, name).get("type") == "string"
        self._arguments((", " if self._count else "") + json.dumps(name, ensure_ascii=False) + ": ")
        if self._is_text:
            self._arguments('"')
        self._count += 1
        self._state = "value"
        return True

    def _tag(self, rest: str, tag: str, final: bool) -> str | None:
        """The name in ``<tag=name>``, taken from the buffer; empty: it is none; None: more text is needed."""
        if rest.startswith(tag):
            at = rest.find(">")
            name = rest[len(tag) : at if at >= 0 else None]
            if at >= 0 and _NAME.fullmatch(name):
                self._buffer = rest[at + 1 :]
                return name.strip()
            if at < 0 and not final and (not name or _NAME.fullmatch(name)):
                return None
        elif not final and tag.startswith(rest):
            return None
        return ""

    def _value(self, final: bool) -> bool:
        """A newline behind the opening tag and one before the closing tag are no part of it."""
        if not self._begun:
            self._buffer = self._buffer.removeprefix("\n")
            self._begun = True
        at = self._buffer.find(_PARAMETER_END)
        if at < 0:
            if self._is_text:
                held = overlap(self._buffer, "\n" + _PARAMETER_END) or overlap(self._buffer, _PARAMETER_END)
                held = 0 if final else held
                self._arguments(_escape(self._buffer[: len(self._buffer) - held]))
                self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        value = self._buffer[:at].removesuffix("\n")
        self._buffer = self._buffer[at + len(_PARAMETER_END) :]
        self._arguments(_escape(value) + '"' if self._is_text else _as_json(value, _schema(self._tool, self._key)))
        self._state = "parameters"
        return True

    def _end(self) -> None:
        if self._before:
            self._content(self._before)
        self._before = ""


def _schema(tool: Tool | None, key: str) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties") if tool is not None else None
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _escape(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


def _as_json(value: str, schema: Mapping[str, Any]) -> str:
    """Text where the schema has no other type, and where the value is no JSON."""
    stripped = value.strip()
    if schema:
        try:
            json.loads(stripped)
        except (ValueError, RecursionError):
            lower = stripped.lower()
            if lower in ("true", "false", "null", "none"):  # as Python writes them
                return "null" if lower == "none" else lower
        else:
            return stripped
    return json.dumps(value, ensure_ascii=False)


def qwen_coder_grammar(token: Callable[[str], str | None]) -> CallGrammar:
    """Required parameters first, in the schema's order; then those that may be left out."""
    end = token(_END)

    def call(tool: Tool) -> str:
        properties = tool.parameters.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        needed = tool.parameters.get("required")
        required = [name for name in needed if name in properties] if isinstance(needed, list) else []
        parts = [text(f"\n{_FUNCTION}{tool.name}>\n")]
        parts += [_parameter(name, properties[name], tool.parameters) for name in required]
        parts += [
            f"({_parameter(name, schema, tool.parameters)})?"
            for name, schema in properties.items()
            if name not in required
        ]
        parts.append(f"{text(_FUNCTION_END + chr(10))} {end}" if end else text(f"{_FUNCTION_END}\n{_END}"))
        return " ".join(parts)

    return CallGrammar(
        _BEGIN, token(_BEGIN), call, separator="\n", rules=r"parameter_text[lazy]: /(.|\n)*\n<\/parameter>\n/"
    )


def _parameter(name: str, schema: Any, root: Mapping[str, Any]) -> str:
    head = text(f"{_PARAMETER}{name}>\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema:
        return f"{head} parameter_text"
    tail = text(f"\n{_PARAMETER_END}\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return f"{head} ({' | '.join(text(str(value)) for value in schema['enum'])}) {tail}"
    whole = {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}} if schema else {}
    return f"{head} {json_rule(whole)} {tail}"
