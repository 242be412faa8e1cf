"""Tokens to text as they come: no character is cut, and no text is given out that may begin a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

__all__ = ["ByteDetokenizer", "Detokenizer", "StopStrings"]

_UNKNOWN = "\ufffd"
_MOST_UNKNOWN = 3  # of a character of four bytes
_WINDOW, _KEPT = 24, 8


class Detokenizer:
    """decode: token ids → text. Bytes that do not make a character yet are U+FFFD at its end.

    before: the prompt's tokens. A decoder strips the space at the beginning of a text, and here it is not one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before[-_KEPT:])  # the last tokens
        self._given = _certain(decode(self._ids)) if self._ids else 0  # characters of their text

    def append(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        text = self._decode(self._ids)
        certain = _certain(text)
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._ids) > _WINDOW:
            # The tokens of a character that is not whole are among the last ones.
            self._ids = self._ids[-_KEPT:]
            self._given = _certain(self._decode(self._ids))
        return new

    def finish(self) -> str:
        """What is left, with U+FFFD for what never became a character."""
        text = self._decode(self._ids) if self._ids else ""
        new = text[self._given :]
        self._given = len(text)
        return new


class ByteDetokenizer:
    """As Detokenizer, where a text's bytes are those of its tokens (byte-level BPE): each token is decoded once.

    token_bytes: By token id.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], before: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in before[-_KEPT:]:
            self.append(token)

    def append(self, token: int) -> str:
        """The text that is certain now and was not before."""
        return self._decoder.decode(self._token_bytes[token])

    def finish(self) -> str:
        """What is left, with U+FFFD for what never became a character."""
        return self._decoder.decode(b"", final=True)


def _certain(text: str) -> int:
    end = len(text)
    while end and len(text) - end < _MOST_UNKNOWN and text[end - 1] == _UNKNOWN:
        end -= 1
    return end


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces."""

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings, self._include = tuple(strings), include
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """The text that may be given out, and the stop string if one is complete. Nothing follows it."""
        if not self._strings:
            return text, None
        text = self._held + text
        found = [(at, len(stop), stop) for stop in self._strings if (at := text.find(stop)) >= 0]
        if found:
            at, size, stop = min(found)
            self._held = ""
            return text[: at + size] if self._include else text[:at], stop
        keep = max(_overlap(text, stop) for stop in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0
