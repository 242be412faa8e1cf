"""What a transcription gives: text, segments and words with times, and the handle of one that runs."""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["FinishReason", "Recognition", "Segment", "StepRecognition", "TokenUsage", "Transcription", "Word"]

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True)
class Word:
    """start, end: seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """A phrase. start, end: seconds. tokens: the model's. avg_logprob: of the tokens, by the model.

    no_speech_prob: that nobody speaks; None: the model does not tell.
    """

    text: str
    start: float
    end: float
    tokens: tuple[int, ...] = ()
    avg_logprob: float | None = None
    words: tuple[Word, ...] = ()
    no_speech_prob: float | None = None


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of the prompt: of audio and of text; and those that were generated."""

    audio_tokens: int
    text_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Transcription:
    """A result. duration: seconds of audio. language: ISO 639-1; None: the model does not tell.

    segments: None where the model knows no times. usage: of a model that generates tokens. finish_reason: "length": the
    model's longest output ended it.
    """

    text: str
    duration: float
    language: str | None = None
    segments: tuple[Segment, ...] | None = None
    usage: TokenUsage | None = None
    finish_reason: FinishReason = "stop"

    @property
    def words(self) -> tuple[Word, ...]:
        """Of all segments."""
        return tuple(word for segment in self.segments or () for word in segment.words)


class Recognition(ABC):
    """A transcription that was submitted: iterate over its text by ``for`` or ``async for``, once; or ``result()``."""

    @abstractmethod
    def __iter__(self) -> Iterator[str]:
        """The text, in pieces as they come. Raises what made it fail."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[str]:
        """The text, in pieces as they come, without blocking the event loop. Raises what made it fail."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, or ends soon as it was cancelled."""

    @abstractmethod
    def result(self) -> Transcription:
        """Wait for the end. Raises what made it fail."""

    @abstractmethod
    def cancel(self) -> None:
        """End it soon, with the reason "cancelled" and the text so far."""


@dataclass
class Control:
    """Whether a computation is to go on. deadline: of time.monotonic()."""

    deadline: float | None = None
    cancelled: bool = False

    @property
    def ended(self) -> FinishReason | None:
        """Why it must end now; None: it goes on."""
        if self.cancelled:
            return "cancelled"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "timeout"
        return None


@dataclass(eq=False)
class StepRecognition(Recognition):
    """Computed step by step by the thread that iterates.

    steps: A generator of pieces of text, which returns the result. It looks at ``control`` between two steps.
    """

    steps: Generator[str, None, Transcription]
    control: Control
    _result: Transcription | None = field(default=None, init=False)

    def _step(self) -> str | None:
        """The next piece; None: the result is there."""
        if self._result is not None:
            return None
        try:
            return next(self.steps)
        except StopIteration as end:
            self._result = end.value
            return None

    def __iter__(self) -> Iterator[str]:
        """The pieces."""
        while (piece := self._step()) is not None:
            yield piece

    async def __aiter__(self) -> AsyncIterator[str]:
        """The pieces; steps run on threads."""
        while (piece := await asyncio.to_thread(self._step)) is not None:
            yield piece

    @property
    def done(self) -> bool:
        """Whether no step is left, or none will be taken."""
        return (
            self._result is not None
            or self.control.cancelled
            or inspect.getgeneratorstate(self.steps) == inspect.GEN_CLOSED
        )

    def result(self) -> Transcription:
        """Computes what is left."""
        for _ in self:
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Before the next step."""
        self.control.cancelled = True
