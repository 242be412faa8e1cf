"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or since 2025 ``[TOOL_CALLS]name[ARGS]{…}``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from untorch.serve.openai.tools.base import Tool, ToolParser
from untorch.serve.openai.tools.grammar import CallGrammar, arguments, text
from untorch.serve.openai.tools.json_call import CallReader, ValueReader

__all__ = ["MistralParser", "mistral_grammar"]

_BEGIN, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?")
_MAYBE_HEAD = re.compile(r"[\w.\s\[\]-]{0,300}")


class MistralParser(ToolParser):
    """Both forms, whichever the model writes."""

    _state: Literal["text", "head", "list", "call", "value"] = "text"
    _is_list = False
    _before = ""  # of a call that may prove to be none
    _value: ValueReader | None = None

    def _step(self, final: bool) -> bool:
        if self._state == "text":
            if not self._text_until(_BEGIN, final):
                return False
            self._state, self._before, self._is_list = "head", _BEGIN, False
            return True
        if self._state == "call":
            assert self._reader is not None
            self._read_call(self._reader)
            if self._reader.failed:
                self._give_up()
            elif self._reader.done:
                self._reader, self._before = None, ""
                self._state = "list" if self._is_list else "text"
            return True
        if self._state == "value":
            assert self._value is not None
            used = self._value.append(self._buffer)
            self._arguments(self._buffer[:used])
            self._buffer = self._buffer[used:]
            if self._value.done:
                self._value, self._state = None, "text"
            return True
        return self._list(final) if self._state == "list" else self._head(final)

    def _head(self, final: bool) -> bool:
        """Behind the marker."""
        rest = self._buffer.lstrip()
        if not rest and not final:
            return False
        if rest.startswith("["):
            self._skip(len(self._buffer) - len(rest) + 1)
            self._state, self._is_list = "list", True
        elif rest.startswith("{"):
            self._reader, self._state = CallReader(), "call"
        else:
            at = self._buffer.find("{")
            if at < 0:
                if not final and _MAYBE_HEAD.fullmatch(self._buffer):
                    return False
                found = _HEAD.fullmatch(self._buffer)
                if found and found[0].rstrip().endswith(_ARGS):  # cut off behind the name
                    self._start(found[1])
                    self._buffer = self._before = ""
                    return True
                self._give_up()
            elif found := _HEAD.fullmatch(self._buffer[:at]):
                self._start(found[1])
                self._buffer, self._before = self._buffer[at:], ""
                self._value, self._state = ValueReader(), "value"
            else:
                self._give_up()
        return True

    def _list(self, final: bool) -> bool:
        rest = self._buffer.lstrip(" \t\r\n,")
        if not rest:
            if not final:
                return False
            self._skip(len(self._buffer))
            if self.calls:
                self._before = ""
            return True
        if rest.startswith("]"):
            self._skip(len(self._buffer) - len(rest) + 1)
            if self.calls:
                self._before, self._state = "", "text"
            else:
                self._give_up()
        elif rest.startswith("{"):
            self._skip(len(self._buffer) - len(rest))
            self._reader, self._state = CallReader(), "call"
        else:
            self._give_up()
        return True

    def _skip(self, count: int) -> None:
        self._before += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> None:
        self._end()
        self._state = "text"

    def _end(self) -> None:
        if self._reader is None or not self._reader.started:
            self._content(self._before + ("" if self._reader is None else self._reader.raw))
        self._reader, self._before = None, ""


def mistral_grammar(token: Callable[[str], str | None]) -> CallGrammar:
    """The form with [ARGS] where the tokenizer has that token."""
    args = token(_ARGS)

    def named(tool: Tool) -> str:
        return f"{text(tool.name)} {args} {arguments(tool.parameters)}"

    def listed(tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        return f"{text(head)} {arguments(tool.parameters)} {text('}')}"

    if args is not None:
        return CallGrammar(_BEGIN, token(_BEGIN), named)
    return CallGrammar(_BEGIN, token(_BEGIN), listed, separator=", ", brackets=("[", "]"))
