"""Reads JSON that comes in pieces: where a value ends, and the name and arguments of a call in an object."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

__all__ = ["CallReader", "ValueReader"]

_SPACE = " \t\r\n"
_BEGINNINGS = '{["-0123456789tfn'
_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


class ValueReader:
    """Finds the end of one JSON value by its quotes and brackets. Its first character must be the value's own."""

    def __init__(self) -> None:
        self.done = False
        self.first = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def append(self, text: str) -> int:
        """How many of the characters belong to the value."""
        for at, character in enumerate(text):
            if not self.first:
                self.first = character
                self._in_string = character == '"'
                self._depth = int(character in "{[")
            elif self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                    self.done = self._depth == 0
            elif self._depth:
                if character == '"':
                    self._in_string = True
                elif character in "{[":
                    self._depth += 1
                elif character in "}]":
                    self._depth -= 1
                    self.done = self._depth == 0
            elif character in ",]};" or character in _SPACE:
                self.done = True
                return at
            if self.done:
                return at + 1
        return len(text)


class CallReader:
    """Reads ``{"name": …, "arguments": {…}}``. The arguments' text is given out as it comes, once the name is known.

    Args:
        known: Names that may be called; None: any.
        needs_arguments: Whether an object without arguments is no call.
    """

    def __init__(self, known: Collection[str] | None = None, needs_arguments: bool = False) -> None:
        self.done = self.failed = False
        self.started = False  # the name was given out
        self.raw = ""
        self._known, self._needs_arguments = known, needs_arguments
        self._state: Literal["open", "key", "colon", "value", "next"] = "open"
        self._reader: ValueReader | None = None
        self._text = ""  # of the key or value that is read
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # before the name is known
        self._given = False  # arguments were given out
        self._out: list[tuple[Literal["name", "arguments"], str]] = []

    def append(self, text: str) -> int:
        """How many of the characters were read: fewer than there are when it is done or failed."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            if self._reader is not None:
                used = self._reader.append(text[at:])
                self._text += text[at : at + used]
                if self._streams and used:
                    self._give(text[at : at + used])
                at += used
                if self._reader.done:
                    self._end()
            elif text[at] in _SPACE:
                at += 1
            elif self._takes(text[at]):
                at += self._reader is None  # a key's or value's first character is the reader's
        self.raw += text[:at]
        return at

    def finish(self) -> None:
        """The text has ended: a call whose name is known begins, with the arguments that came."""
        if not self.done and not self.failed and self._name is not None:
            self._start()

    def take(self) -> list[tuple[Literal["name", "arguments"], str]]:
        """What is known since the last call: the name first, then pieces of the arguments."""
        out, self._out = self._out, []
        return out

    @property
    def _streams(self) -> bool:
        reader = self._reader
        return self._state == "value" and self.started and self._key in _ARGUMENTS and self._first_container(reader)

    def _first_container(self, reader: ValueReader | None) -> bool:
        return reader is not None and bool(reader.first) and reader.first in "{[" and self._arguments is None

    def _takes(self, character: str) -> bool:
        """One character between keys and values. False: it may not be there."""
        state = self._state
        if state == "open" and character == "{":
            self._state = "key"
        elif state == "key" and character == '"':
            self._reader, self._text = ValueReader(), ""
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state == "value" and character in _BEGINNINGS:
            self._reader, self._text = ValueReader(), ""
            if self._key in _ARGUMENTS and self._name is not None:
                self._start()
                if self.failed:
                    return False
        elif state == "next" and character == ",":
            self._state = "key"
        elif state in ("key", "next") and character == "}":
            self._finish()
            return not self.failed
        else:
            self._fail()
            return False
        return True

    def _end(self) -> None:
        """Of a key or a value."""
        streamed, self._reader = self._streams, None
        if self._state == "key":
            key = self._loads()
            self._key, self._state = str(key), "colon"
            return
        self._state = "next"
        if self._key == _NAME and self._name is None:
            name = self._loads()
            if not isinstance(name, str) or not name:
                self._fail()
                return
            self._name = name
            if self._arguments is not None:
                self._start()
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = self._text
            if self.started and not streamed:
                self._give(_arguments(self._text))

    def _loads(self) -> object:
        try:
            value: object = json.loads(self._text, strict=False)
        except ValueError:
            return None
        return value

    def _start(self) -> None:
        if self.started:
            return
        assert self._name is not None
        if self._known is not None and self._name not in self._known:
            self._fail()
            return
        self.started = True
        self._out.append(("name", self._name))
        if self._arguments is not None:
            self._give(_arguments(self._arguments))

    def _give(self, text: str) -> None:
        self._given = True
        self._out.append(("arguments", text))

    def _finish(self) -> None:
        if self._name is None or (self._needs_arguments and self._arguments is None):
            self._fail()
            return
        self._start()
        if self.started:
            self.done = True
            if not self._given:
                self._give("{}")

    def _fail(self) -> None:
        """Of a call that was given out, what it has stays."""
        self._reader = None
        if self.started:
            self.done = True
        else:
            self.failed = True


def _arguments(text: str) -> str:
    """As an object: some models write the object as a string, or null."""
    if text.startswith('"'):
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            return text
    return "{}" if text == "null" else text
