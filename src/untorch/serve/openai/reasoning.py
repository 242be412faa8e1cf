"""Splits the thoughts of a model, ``<think>…</think>``, from its answer while the text comes."""

from __future__ import annotations

from typing import Literal

from untorch.serve.openai.tools.base import overlap

__all__ = ["THINK", "ThoughtSplitter"]

THINK, _END = "<think>", "</think>"

Part = tuple[Literal["thought", "answer"], str]


class ThoughtSplitter:
    """White space at the ends of the thoughts, and before the answer behind them, is dropped.

    is_open: the prompt has begun the thoughts.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._state: Literal["start", "thought", "gap", "answer"] = "thought" if is_open else "start"
        self._buffer = ""
        self._begun = False  # a thought was given out

    def append(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and self._step(parts, False):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back."""
        parts: list[Part] = []
        while self._buffer and self._step(parts, True):
            pass
        return parts

    def _step(self, parts: list[Part], final: bool) -> bool:
        if self._state == "answer":
            parts.append(("answer", self._buffer))
            self._buffer = ""
            return False
        if self._state == "thought":
            return self._think(parts, final)
        rest = self._buffer.lstrip()
        if self._state == "gap":
            self._buffer = rest
            if rest:
                self._state = "answer"
            return bool(rest)
        if rest.startswith(THINK):
            self._buffer, self._state = rest[len(THINK) :], "thought"
            return True
        if not final and THINK.startswith(rest):
            return False
        self._state = "answer"
        return True

    def _think(self, parts: list[Part], final: bool) -> bool:
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(_END)
        if at >= 0:
            text, self._buffer, self._state = self._buffer[:at].rstrip(), self._buffer[at + len(_END) :], "gap"
        else:
            held = 0 if final else overlap(self._buffer, _END)
            text = self._buffer[: len(self._buffer) - held].rstrip()
            self._buffer = "" if final else self._buffer[len(text) :]
        if text:
            self._begun = True
            parts.append(("thought", text))
        return self._state == "gap"
