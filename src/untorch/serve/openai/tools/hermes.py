"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as often as there are calls."""

from __future__ import annotations

import json
from collections.abc import Callable

from untorch.serve.openai.tools.base import Tool, ToolParser
from untorch.serve.openai.tools.grammar import CallGrammar, arguments, text
from untorch.serve.openai.tools.json_call import CallReader

__all__ = ["HermesParser", "hermes_grammar"]

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """A closing tag that is missing is no error."""

    _closing = False

    def _step(self, final: bool) -> bool:
        if self._closing:
            rest = self._buffer.lstrip()
            if rest.startswith(_END):
                self._buffer = rest[len(_END) :]
            elif _END.startswith(rest):
                if not final:
                    return False
                self._buffer = ""
            self._closing = False
            return True
        if self._reader is None:
            if not self._text_until(_BEGIN, final):
                return False
            self._reader = CallReader()
            return True
        self._read_call(self._reader)
        if self._reader.failed:
            self._content(_BEGIN + self._reader.raw)
            self._reader = None
        elif self._reader.done:
            self._reader, self._closing = None, True
        return True

    def _end(self) -> None:
        if self._reader is not None and not self._reader.started:
            self._content(_BEGIN + self._reader.raw)
        self._reader = None


def hermes_grammar(token: Callable[[str], str | None]) -> CallGrammar:
    """As the models' chat templates show calls."""

    def call(tool: Tool) -> str:
        head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
        end = token(_END)
        tail = f"{text('}' + chr(10))} {end}" if end else text("}\n" + _END)
        return f"{text(head)} {arguments(tool.parameters)} {tail}"

    return CallGrammar(_BEGIN, token(_BEGIN), call, separator="\n")
