"""CTC: a waveform to logits of frames, the likeliest label of each, repeated labels and blanks left out."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError
from untorch.runtime.program import Program
from untorch.speech.features import normalize
from untorch.speech.outputs import Control, Recognition, Segment, StepRecognition, Transcription, Word
from untorch.speech.request import TranscriptionRequest
from untorch.speech.settings import SpeechSettings

__all__ = ["CtcModel", "CtcText"]

# Words are joined to a phrase: a pause, or its length in characters, ends it.
_PAUSE = 0.8
_LONGEST = 80


class CtcModel:
    """Wav2Vec2, HuBERT and the like. It takes no parameters; it knows when each word was said."""

    parameters: frozenset[str] = frozenset()
    has_times = True
    has_words = True
    translates = False
    engine = None

    def __init__(self, program: Program, settings: SpeechSettings) -> None:
        self._settings = settings
        self._method = program[settings.method]
        text = program._program.entry(settings.vocabulary)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
            raise InvalidFileError(f"{program.path}: {settings.vocabulary}: expected a JSON list of strings")
        self._vocabulary: list[str] = found

    def submit(self, samples: NDArray[np.float32], request: TranscriptionRequest) -> Recognition:
        """Raises InvalidArgumentError."""
        settings = self._settings
        if len(samples) < settings.min_samples:
            raise InvalidArgumentError(
                f"transcribe: audio: expected at least {settings.min_samples} samples at {settings.sampling_rate} Hz, "
                f"got {len(samples)}"
            )
        control = Control(request.deadline)
        return StepRecognition(self._steps(samples, control), control)

    def close(self, drain: float = 0.0) -> None:
        """There is nothing that runs by itself."""

    def _steps(self, samples: NDArray[np.float32], control: Control) -> Generator[str, None, Transcription]:
        settings = self._settings
        duration = len(samples) / settings.sampling_rate
        if settings.normalize:
            samples = normalize(samples)
        text = CtcText(self._vocabulary, settings, duration)
        for start, begin, end, stop in _chunks(len(samples), settings):
            if control.ended is not None:
                break
            logits: Any = self._method(np.ascontiguousarray(samples[None, start:stop]))
            found: NDArray[Any] = logits.numpy() if isinstance(logits, Tensor) else np.asarray(logits)
            first = (begin - start) // settings.frame_samples
            count = (end - begin) // settings.frame_samples if stop > end else None
            frames = found[0, first:] if count is None else found[0, first : first + count]
            yield text.append(frames)
        return Transcription(
            text.text, duration, settings.languages[0] if settings.languages else None, text.segments(),
            finish_reason=control.ended or "stop",
        )  # fmt: skip


def _chunks(count: int, settings: SpeechSettings) -> Iterator[tuple[int, int, int, int]]:
    """Windows of the samples: start and stop; and between them begin and end, whose frames are taken.

    Each window has ``overlap_samples`` of its neighbours on each side; a last one that would be shorter than that joins
    the one before.
    """
    most, overlap = settings.chunk_samples, settings.overlap_samples
    if count <= most:
        yield 0, 0, count, count
        return
    core, begin = most - 2 * overlap, 0
    while True:
        start, stop = max(0, begin - overlap), begin + core + overlap
        if stop >= count:
            yield start, begin, count, count
            return
        yield start, begin, begin + core, stop
        begin += core


@dataclass
class _Run:
    """A label, and the frames [start, end) that it has."""

    label: int
    start: int
    end: int
    logprob: float


@dataclass
class CtcText:
    """The text of frames that come in pieces, with the times of its words, as transformers' CTC tokenizers have it."""

    vocabulary: list[str]
    settings: SpeechSettings
    duration: float
    text: str = field(default="", init=False)
    _runs: list[_Run] = field(default_factory=list, init=False)
    _frames: int = field(default=0, init=False)
    _given: int = field(default=0, init=False)  # runs whose text was given out
    _spaces: str = field(default="", init=False)  # held back until something follows: those at the ends are no text

    def append(self, logits: NDArray[Any]) -> str:
        """Logits [frames, labels]. The text that is certain now and was not before."""
        scores = logits.astype(np.float32)
        labels = scores.argmax(1)
        largest = scores.max(1)
        logprobs = -np.log(np.exp(scores - largest[:, None]).sum(1))
        for label, logprob in zip(labels.tolist(), logprobs.tolist(), strict=True):
            if self._runs and self._runs[-1].label == label:
                self._runs[-1].end += 1
                self._runs[-1].logprob += logprob
            else:
                self._runs.append(_Run(label, self._frames, self._frames + 1, logprob))
            self._frames += 1
        new = ""
        for run in self._runs[self._given :]:
            for character in self._character(run.label):
                if character.isspace():
                    self._spaces += character
                else:
                    new += (self._spaces if self.text or new else "") + character
                    self._spaces = ""
        self._given = len(self._runs)
        self.text += new
        return new

    def _character(self, label: int) -> str:
        if label == self.settings.blank_id or label >= len(self.vocabulary):
            return ""
        token = self.vocabulary[label]
        if token == self.settings.word_delimiter:
            return " "
        return token.lower() if self.settings.lower_case else token

    def segments(self) -> tuple[Segment, ...]:
        """Words in phrases."""
        groups: list[list[tuple[Word, list[_Run]]]] = []
        for word, runs in self._words():
            last = groups[-1] if groups else []
            length = sum(len(one.text) + 1 for one, _ in last) + len(word.text)
            if last and word.start - last[-1][0].end < _PAUSE and length <= _LONGEST:
                last.append((word, runs))
            else:
                groups.append([(word, runs)])
        return tuple(map(_segment, groups))

    def _words(self) -> Iterator[tuple[Word, list[_Run]]]:
        samples, rate = self.settings.frame_samples, self.settings.sampling_rate
        text, runs = "", list[_Run]()
        for run in [*self._runs, None]:
            character = " " if run is None else self._character(run.label)
            if run is not None and character and not character.isspace():
                text += character
                runs.append(run)
            elif character and runs:  # a blank has no character, and ends no word
                # One division, as transformers does: 1.38, not 1.3800000000000001.
                start, end = runs[0].start * samples / rate, runs[-1].end * samples / rate
                yield Word(text, start, min(end, self.duration)), runs
                text, runs = "", []


def _segment(words: list[tuple[Word, list[_Run]]]) -> Segment:
    runs = [run for _, of_word in words for run in of_word]
    frames = sum(run.end - run.start for run in runs)
    return Segment(
        " ".join(word.text for word, _ in words), words[0][0].start, words[-1][0].end,
        tuple(run.label for run in runs), sum(run.logprob for run in runs) / frames, tuple(word for word, _ in words),
    )  # fmt: skip
