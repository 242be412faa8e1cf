"""What parsers of tool calls have in common: the tools, the events that a text makes, and text that waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from untorch.serve.openai.tools.json_call import CallReader

__all__ = ["CallArguments", "CallStart", "Content", "Event", "Tool", "ToolParser", "overlap"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the schema of its arguments. definition: for the template."""

    name: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}, "additionalProperties": False}
    )
    strict: bool = False
    definition: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call began. index: of the message's calls."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the call's arguments, which are JSON once they are whole."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ToolParser(ABC):
    """Text in pieces to events; the same ones, joined, however the text is cut.

    What looks like a call and is none comes out as text; so does a call that ends before its name is whole. One that
    ends behind it has the arguments that came. White space around calls is dropped.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.calls = 0
        self._buffer = ""
        self._space = ""
        self._events: list[Event] = []
        self._reader: CallReader | None = None

    def append(self, text: str) -> list[Event]:
        """More text."""
        self._buffer += text
        while self._buffer and self._step(False):
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The text has ended."""
        while self._buffer and self._step(True):
            pass
        if self._reader is not None:
            self._reader.finish()
            self._read_call(self._reader)
        self._end()
        if self._space and not self.calls:
            self._events.append(Content(self._space))
        self._space = ""
        return self._take()

    @abstractmethod
    def _step(self, final: bool) -> bool:
        """Take something from the buffer. False: it needs more text; with final, nothing may stay."""

    @abstractmethod
    def _end(self) -> None:
        """The text ended inside a call: what was held back."""

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(Content(kept))

    def _start(self, name: str) -> None:
        self._space = ""
        self._events.append(CallStart(self.calls, name))
        self.calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.calls - 1, text))

    def _text_until(self, marker: str, final: bool) -> bool:
        """Give out text up to the marker. True: it was found, and is taken from the buffer."""
        at = self._buffer.find(marker)
        if at >= 0:
            self._content(self._buffer[:at])
            self._buffer = self._buffer[at + len(marker) :]
            return True
        held = 0 if final else overlap(self._buffer, marker)
        self._content(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _read_call(self, reader: CallReader) -> None:
        """Let it read from the buffer, and give out what it found."""
        used = reader.append(self._buffer)
        self._buffer = self._buffer[used:]
        for kind, text in reader.take():
            if kind == "name":
                self._start(text)
            else:
                self._arguments(text)


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of the text that begins the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
