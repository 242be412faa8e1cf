"""One choice of a chat while its text comes: thoughts, content and tool calls as the API's deltas."""

from __future__ import annotations

from typing import Any

from untorch.serve.openai.reasoning import ThoughtSplitter
from untorch.serve.openai.tools import ToolFormat, new_call_id
from untorch.serve.openai.tools.base import CallStart, Content, Event
from untorch.serve.openai.tools.choice import ToolChoice

__all__ = ["ChatChoice", "message_of"]

Delta = dict[str, Any]


class ChatChoice:
    """tools: None: all text is content. splits: whether thoughts are split off; is_open: the prompt began them."""

    def __init__(self, tools: ToolChoice | None, tool_format: ToolFormat | None, splits: bool, is_open: bool) -> None:
        self._format = tool_format
        self._parser = tool_format.parser(tools.callable) if tools is not None and tool_format is not None else None
        self._many = tools is None or tools.many
        self._splitter = ThoughtSplitter(is_open) if splits else None
        self._has_calls = False

    def append(self, text: str) -> list[Delta]:
        """More text."""
        if self._splitter is None:
            return self._answer(text)
        return self._parts(self._splitter.append(text))

    def finish(self) -> list[Delta]:
        """The text has ended."""
        deltas = [] if self._splitter is None else self._parts(self._splitter.finish())
        return deltas if self._parser is None else deltas + self._deltas(self._parser.finish())

    def reason(self, finish_reason: str) -> str:
        """OpenAI's finish_reason."""
        return "tool_calls" if self._has_calls and finish_reason == "stop" else finish_reason

    def _parts(self, parts: list[Any]) -> list[Delta]:
        deltas: list[Delta] = []
        for kind, text in parts:
            deltas += [{"reasoning_content": text}] if kind == "thought" else self._answer(text)
        return deltas

    def _answer(self, text: str) -> list[Delta]:
        if self._parser is not None:
            return self._deltas(self._parser.append(text))
        return [{"content": text}] if text else []

    def _deltas(self, events: list[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for one in events:
            if isinstance(one, Content):
                deltas.append({"content": one.text})
                continue
            if one.index and not self._many:
                continue
            if isinstance(one, CallStart):
                self._has_calls = True
                assert self._format is not None
                call: Delta = {
                    "index": one.index, "id": new_call_id(self._format), "type": "function",
                    "function": {"name": one.name, "arguments": ""},
                }  # fmt: skip
            else:
                call = {"index": one.index, "function": {"arguments": one.text}}
            deltas.append({"tool_calls": [call]})
        return deltas


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    """The whole message that the deltas make."""
    content = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not content and (calls or thought):
        message["content"] = None
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message
