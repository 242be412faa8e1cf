"""Speech language models (Voxtral): an encoder's embeddings of the sound in the prompt of a causal language model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.llm import Engine, Generation, Prompt, SamplingParams
from untorch.llm.outputs import RequestOutput
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError
from untorch.runtime.program import Program
from untorch.speech.features import LogMel
from untorch.speech.outputs import Recognition, TokenUsage, Transcription
from untorch.speech.request import TranscriptionRequest
from untorch.speech.settings import SpeechSettings

__all__ = ["SpeechLanguageModel"]


class SpeechLanguageModel:
    """The engine is the package's own language model: it may be asked for other things meanwhile."""

    parameters: frozenset[str] = frozenset({"language", "temperature", "seed"})
    has_times = False
    has_words = False
    translates = False

    def __init__(self, program: Program, settings: SpeechSettings, **options: Any) -> None:
        self._settings = settings
        self._encode = program[settings.method]
        self._log_mel = LogMel(settings.read_filters(program), settings.n_fft, settings.hop_length)
        self.engine = Engine(program, **options)
        try:
            if any(isinstance(item, str) and item != "audio" for item in settings.template):
                tokenizer = self.engine.tokenizer
                if tokenizer is None:
                    raise InvalidFileError(f"{program.path}: its speech model needs a tokenizer, and it has none")
            if not self.engine.settings.hidden:
                raise InvalidFileError(f"{program.path}: its language model takes no embeddings")
        except BaseException:
            self.engine.close()
            raise

    def submit(self, samples: NDArray[np.float32], request: TranscriptionRequest) -> Recognition:
        """Encodes the audio, and begins to generate. Raises InvalidArgumentError if it does not fit the model."""
        embeddings = self._embed(samples)
        tokens: list[int] = []
        position = 0
        for item in self._settings.template:
            if item == "audio":
                position = len(tokens)
                tokens += [self._settings.placeholder] * len(embeddings)
            elif isinstance(item, int):
                tokens.append(item)
            elif request.language is not None:
                assert self.engine.tokenizer is not None
                text = item.replace("{language}", request.language)
                tokens += self.engine.tokenizer.encode(text, add_special_tokens=False)
        most = self.engine.max_prompt_tokens
        if len(tokens) > most:
            seconds = len(samples) / self._settings.sampling_rate
            raise InvalidArgumentError(
                f"transcribe: audio: expected at most {most} tokens, which is what the model's length and the memory "
                f"for it allow, got {len(tokens)} for {seconds:.1f} seconds: cut it into parts"
            )
        params = SamplingParams(temperature=request.temperature or 0.0, seed=request.seed, max_tokens=None)
        # An encoder may have taken all of the time: then the first step ends the request.
        left = None if request.deadline is None else max(1e-3, request.deadline - time.monotonic())
        generation = self.engine.submit(Prompt(tokens, {position: embeddings}), params, timeout=left)
        duration = len(samples) / self._settings.sampling_rate
        return _Generated(generation, duration, request.language, len(embeddings))

    def close(self, drain: float = 0.0) -> None:
        """Cancels what still runs after ``drain`` seconds."""
        self.engine.close(drain)

    def _embed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of all chunks [tokens, hidden]; the last one is padded with silence."""
        size = self._settings.chunk_samples
        padded = np.zeros(-(-len(samples) // size) * size, np.float32)
        padded[: len(samples)] = samples
        features = self._log_mel(padded)
        frames = size // self._settings.hop_length
        found = []
        for begin in range(0, features.shape[1], frames):
            rows: Any = self._encode(np.ascontiguousarray(features[None, :, begin : begin + frames]))
            found.append(np.asarray(rows.numpy() if isinstance(rows, Tensor) else rows, np.float32))
        return np.concatenate(found)


class _Generated(Recognition):
    def __init__(self, generation: Generation, duration: float, language: str | None, audio_tokens: int) -> None:
        self._generation, self._duration = generation, duration
        self._language, self._audio_tokens = language, audio_tokens

    def __iter__(self) -> Iterator[str]:
        for chunk in self._generation:
            if chunk.text:
                yield chunk.text

    async def __aiter__(self) -> AsyncIterator[str]:
        async for chunk in self._generation:
            if chunk.text:
                yield chunk.text

    @property
    def done(self) -> bool:
        return self._generation.done

    def result(self) -> Transcription:
        output: RequestOutput = self._generation.result()
        prompt = output.usage.prompt_tokens
        usage = TokenUsage(self._audio_tokens, prompt - self._audio_tokens, output.usage.completion_tokens)
        reason = output.finish_reason
        assert reason != "error"
        return Transcription(output.text, self._duration, self._language, usage=usage, finish_reason=reason)

    def cancel(self) -> None:
        self._generation.cancel()
