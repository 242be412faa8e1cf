"""Llama 3: ``{"name": …, "parameters": {…}}`` as the whole text, or behind ``<|python_tag|>``; several behind ``;``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from untorch.serve.openai.tools.base import Tool, ToolParser
from untorch.serve.openai.tools.grammar import CallGrammar, arguments, text
from untorch.serve.openai.tools.json_call import CallReader

__all__ = ["LlamaParser", "llama_grammar"]

_BEGIN = "<|python_tag|>"


class LlamaParser(ToolParser):
    """Without the marker, an object is a call only if it names one of the tools and has parameters."""

    _state: Literal["start", "text", "marked", "call", "after"] = "start"
    _is_marked = False
    _before = ""  # of a call that may prove to be none

    def _step(self, final: bool) -> bool:
        if self._state == "call":
            assert self._reader is not None
            self._read_call(self._reader)
            if self._reader.failed:
                self._end()
                self._state = "text"
            elif self._reader.done:
                self._reader, self._state, self._before = None, "after", ""
            return True
        if self._state == "text":
            if not self._text_until(_BEGIN, final):
                return False
            self._state, self._before, self._is_marked = "marked", _BEGIN, True
            return True
        # Between calls, or before the first one.
        separators = " \t\r\n;" if self._state == "after" else " \t\r\n"
        rest = self._buffer.lstrip(separators)
        if not rest and self._state == "after" and final:
            self._buffer = ""
        elif rest.startswith(_BEGIN) and self._state != "marked":
            self._before += self._buffer[: len(self._buffer) - len(rest)] + _BEGIN
            self._buffer, self._state, self._is_marked = rest[len(_BEGIN) :], "marked", True
        elif rest.startswith("{"):
            self._before += self._buffer[: len(self._buffer) - len(rest)]
            marked = self._is_marked
            self._reader = CallReader(None if marked else self.tools, needs_arguments=not marked)
            self._buffer, self._state = rest, "call"
        elif not final and (not rest or (_BEGIN.startswith(rest) and self._state != "marked")):
            return False
        else:
            self._end()
            self._state = "text"
        return True

    def _end(self) -> None:
        if self._reader is None or not self._reader.started:
            self._content(self._before + ("" if self._reader is None else self._reader.raw))
        self._reader, self._before = None, ""


def llama_grammar(token: Callable[[str], str | None]) -> CallGrammar:
    """Calls without the marker, as the models' chat templates ask for."""

    def call(tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
        return f"{text(head)} {arguments(tool.parameters)} {text('}')}"

    return CallGrammar("", None, call, separator="; ")
