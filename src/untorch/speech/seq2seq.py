"""Encoder-decoder speech models (Whisper): windows of a log-mel spectrogram, each decoded token by token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.llm.detokenizer import Detokenizer
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from untorch.runtime.program import Program
from untorch.speech.features import LogMel
from untorch.speech.logit_rules import LogitRules, log_softmax
from untorch.speech.outputs import Control, Recognition, Segment, StepRecognition, Transcription
from untorch.speech.request import TranscriptionRequest
from untorch.speech.seq2seq_segments import split_window
from untorch.speech.seq2seq_settings import Seq2SeqSettings
from untorch.speech.settings import SpeechSettings

__all__ = ["Seq2SeqModel"]


class Seq2SeqModel:
    """Each request has a session: its copy of the cache of keys and values. Tokens are the likeliest, or sampled."""

    has_times = True
    has_words = False
    engine = None

    def __init__(self, program: Program, settings: SpeechSettings) -> None:
        assert settings.seq2seq is not None
        self._program, self._settings = program, settings
        self._rules: Seq2SeqSettings = settings.seq2seq
        self._log_mel = LogMel(settings.read_filters(program), settings.n_fft, settings.hop_length)
        self._tokenizer = _read_tokenizer(program, self._rules.tokenizer)
        self.translates = self._rules.translate is not None
        names = {"temperature", "seed"}
        if self._rules.previous is not None:
            names.add("prompt")
        if self._rules.languages:
            names.add("language")
        self.parameters = frozenset(names)

    def submit(self, samples: NDArray[np.float32], request: TranscriptionRequest) -> Recognition:
        """Raises InvalidArgumentError."""
        prompt = self._prompt(request.prompt)
        control = Control(request.deadline)
        return StepRecognition(self._steps(samples, request, prompt, control), control)

    def close(self, drain: float = 0.0) -> None:
        """Requests have their own sessions."""

    def _prompt(self, text: str | None) -> list[int]:
        """The text's last tokens, behind the one that says so: half of the positions are for them."""
        if text is None or not text.strip():
            return []
        ids: list[int] = self._tokenizer.encode(" " + text.strip(), add_special_tokens=False).ids
        if any(token >= self._rules.end for token in ids):
            raise InvalidArgumentError(f"transcribe: prompt: expected text without special tokens, got {text!r:.80}")
        assert self._rules.previous is not None
        return [self._rules.previous, *ids[-(self._rules.max_tokens // 2 - 2) :]]

    def _steps(
        self, samples: NDArray[np.float32], request: TranscriptionRequest, prompt: list[int], control: Control
    ) -> Generator[str, None, Transcription]:
        settings = self._settings
        duration = len(samples) / settings.sampling_rate
        size = settings.chunk_samples
        with_times = request.timestamps or len(samples) > size
        if len(samples) < size:
            samples = np.concatenate([samples, np.zeros(size - len(samples), np.float32)])
        features = self._log_mel(samples)
        session = self._program.session()
        try:
            decoding = _Decoding(self, session, request, with_times)
            segments: list[Segment] = []
            seek, total, text = 0, features.shape[1], ""
            while seek < total and control.ended is None:
                pieces = decoding.window(features[:, seek:], prompt if seek == 0 else [], control)
                found: list[Segment] = []
                while True:
                    try:
                        piece = next(pieces)
                    except StopIteration as end:
                        found, advance = end.value
                        break
                    piece = piece if text else piece.lstrip()
                    text += piece
                    yield piece
                offset = seek * settings.hop_length / settings.sampling_rate
                # 0.14, not 0.14000000000000001.
                segments += [
                    replace(one, start=round(offset + one.start, 3), end=round(offset + one.end, 3)) for one in found
                ]
                # A pair of times at a window's begin would lead nowhere.
                seek += advance or settings.window_frames
        finally:
            session.close()
        return Transcription(text, duration, decoding.language, tuple(segments), finish_reason=control.ended or "stop")


class _Decoding:
    """What the windows of a request have in common."""

    def __init__(self, model: Seq2SeqModel, session: Any, request: TranscriptionRequest, with_times: bool) -> None:
        self._settings, self._tokenizer = model._settings, model._tokenizer
        assert self._settings.seq2seq is not None
        self._own: Seq2SeqSettings = self._settings.seq2seq
        self._encode, self._decode = session[self._settings.method], session[self._own.decode]
        self._rules, self._with_times = LogitRules(self._own, with_times), with_times
        self._task = self._own.translate if request.task == "translate" else self._own.transcribe
        self._temperature = request.temperature or 0.0
        self._random = np.random.default_rng(request.seed)
        fixed = self._settings.languages[0] if len(self._settings.languages) == 1 else None
        self.language: str | None = request.language or fixed

    def window(
        self, features: NDArray[np.float32], prompt: Sequence[int], control: Control
    ) -> Generator[str, None, tuple[list[Segment], int]]:
        """Pieces of text; then the segments, and the frames to the next window.

        features: [n_mels, frames] from the window's begin on.
        """
        settings, own = self._settings, self._own
        frames = settings.window_frames
        count = min(features.shape[1], frames)
        padded = np.zeros((1, settings.n_mels, frames), np.float32)
        padded[0, :, :count] = features[:, :count]
        logits = _float32(self._encode(padded))[0]  # of the token that starts
        silence = None if own.no_speech is None else float(np.exp(log_softmax(logits)[own.no_speech]))
        start = [own.start]
        if own.languages:
            if self.language is None:
                self.language = max(own.languages, key=lambda name: logits[own.languages[name]])
            start.append(own.languages[self.language])
        start += [self._task] if self._task is not None else []
        start += [] if self._with_times else [own.no_timestamps]

        seconds = count * settings.hop_length / settings.sampling_rate
        tokens: list[int] = []
        logprobs: list[float] = []
        detokenizer, done = Detokenizer(self._text), 0
        given, position = [*prompt, *start], 0
        while position + len(given) < own.max_tokens and control.ended is None:
            logits = _float32(self._decode(np.asarray([given], np.int64), np.asarray([position], np.int64)))[0]
            position += len(given)
            token, logprob = self._choose(self._rules.apply(logits, tokens))
            if token == own.end:
                break
            tokens.append(token)
            logprobs.append(logprob)
            given = [token]
            if not self._with_times:
                if token < own.end and (piece := detokenizer.append(token)):
                    yield piece
            elif token >= own.first_time and len(tokens) > 1 and tokens[-2] >= own.first_time:
                # What comes before a pair is certain to be kept.
                yield self._text(tokens[done:-1])
                done = len(tokens) - 1
        found = split_window(tokens, own.first_time, own.seconds_per_token, seconds)
        if not self._with_times:
            yield detokenizer.finish()
        elif found.spans and found.spans[-1].end > done:
            yield self._text(tokens[done : found.spans[-1].end])
        segments = [
            Segment(
                self._text(tokens[one.begin : one.end]), one.start, one.stop, tuple(tokens[one.begin : one.end]),
                sum(logprobs[one.begin : one.end]) / max(1, one.end - one.begin), (), silence,
            )
            for one in found.spans
        ]  # fmt: skip
        rate = settings.sampling_rate / settings.hop_length
        return segments, count if found.advance is None else round(found.advance * rate)

    def _choose(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """The token, and its log-probability without the temperature."""
        logprobs = log_softmax(logits)
        if self._temperature == 0:
            token = int(logits.argmax())
        else:
            weights = np.exp(log_softmax(logits / np.float32(self._temperature)).astype(np.float64))
            token = int(self._random.choice(len(weights), p=weights / weights.sum()))
        return token, float(logprobs[token])

    def _text(self, tokens: Sequence[int]) -> str:
        """Without times and special tokens."""
        text: str = self._tokenizer.decode([token for token in tokens if token < self._own.end])
        return text


def _float32(found: Any) -> NDArray[np.float32]:
    array = found.numpy() if isinstance(found, Tensor) else np.asarray(found)
    return array.astype(np.float32, copy=False)


def _read_tokenizer(program: Program, name: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError(
            f"{program.path}: its speech model needs the package tokenizers: pip install 'untorch[speech]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_buffer(program._program.entry(name))
    except Exception as error:  # tokenizers raises plain Exception
        raise InvalidFileError(f"{program.path}: {name} is damaged: {error}") from None
