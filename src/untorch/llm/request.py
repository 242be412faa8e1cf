"""A request's state in the engine, and the handle that its caller has."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Generic, Protocol, TypeVar

from untorch.llm.detokenizer import Detokenizer, StopStrings
from untorch.llm.outputs import Chunk, Completion, FinishReason, RequestOutput, Usage
from untorch.llm.params import SamplingParams
from untorch.llm.sampler import SampledToken, SamplerState, TokenLogprobs
from untorch.llm.sequence import Sequence
from untorch.llm.tokenizer import Tokenizer

__all__ = ["Generation", "Handle", "Request", "Sample"]


class _Result(Protocol):
    @property
    def error(self) -> Exception | None: ...


Output = TypeVar("Output", bound=_Result)


class Handle(Generic[Output]):
    """A request that was submitted: wait for its ``result()``, ``await`` it, or ``cancel()`` it."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._result: Output | None = None
        self._wakes: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End it with the reason "cancelled" and the tokens that it has. Nothing happens if it is finished."""
        if self._result is None:
            self._cancel()

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end. Raises TimeoutError after ``timeout`` seconds; what made the request fail."""
        output = self.wait(timeout)
        if output.error is not None:
            raise output.error
        return output

    def wait(self, timeout: float | None = None) -> Output:
        """As ``result``, but an error is in the output's ``error``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._result is not None, timeout):
                raise TimeoutError(f"the request has not finished after {timeout} seconds")
        assert self._result is not None
        return self._result

    def __await__(self) -> Generator[Any, None, Output]:
        """The result, without blocking the event loop. Raises what made the request fail."""
        return self._finished().__await__()

    async def _finished(self) -> Output:
        event = self._event()
        while self._result is None:
            await event.wait()
            event.clear()
        return self.result()

    def _event(self) -> asyncio.Event:
        """Set in the running loop whenever something comes."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            self._wakes.append(wake)
        return event

    def _push(self, chunk: Chunk | None = None, result: Output | None = None) -> None:
        with self._changed:
            if chunk is not None:
                self._chunks.append(chunk)
            if result is not None:
                self._result = result
            self._changed.notify_all()
            wakes = list(self._wakes)
        for wake in wakes:
            wake()


class Generation(Handle[RequestOutput]):
    """A request that was submitted: wait for its ``result()``, iterate over its chunks, or ``cancel()`` it.

    Iterate with ``for`` or ``async for``, once.
    """

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks. Raises what made the request fail."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._result is not None)
                chunks, end = list(self._chunks), self._result
                self._chunks.clear()
            yield from chunks
            if end is not None:
                if end.error is not None:
                    raise end.error
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks, without blocking the event loop. Raises what made the request fail."""
        event = self._event()
        while True:
            with self._changed:
                event.clear()
                chunks, end = list(self._chunks), self._result
                self._chunks.clear()
            for chunk in chunks:
                yield chunk
            if end is not None:
                if end.error is not None:
                    raise end.error
                return
            if not chunks:
                await event.wait()


class Sample:
    """One completion while it grows."""

    def __init__(self, request: Request, sequence: Sequence, state: SamplerState) -> None:
        self.request, self.sequence, self.state = request, sequence, state
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        params, tokenizer = request.params, request.tokenizer
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(lambda ids: tokenizer.decode(ids, params.skip_special_tokens), request.prompt)
        )

    @property
    def token_ids(self) -> list[int]:
        """Of the output."""
        return self.sequence.tokens[self.sequence.prompt_length :]

    def append(self, sampled: SampledToken, max_positions: int) -> Chunk:
        """Takes the token, and decides whether it is the last."""
        token, params = sampled.token, self.request.params
        self.sequence.tokens.append(token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        self.state.append(token)
        text = self._stop(token)
        if self.finish_reason is None and (
            len(self.sequence.tokens) >= max_positions or self.state.generated == params.max_tokens
        ):
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._rest()
        return self._chunk([token], text)

    def finish(self, reason: FinishReason) -> Chunk:
        """Ends it for a reason from outside."""
        self.finish_reason = reason
        return self._chunk([], self._rest())

    def completion(self) -> Completion:
        """Once it is finished."""
        assert self.finish_reason is not None
        logprobs = self.logprobs if self.request.params.logprobs is not None else None
        return Completion(
            self.state.index, self.token_ids, self.text, self.finish_reason, self.stop_reason, logprobs
        )  # fmt: skip

    def _stop(self, token: int) -> str:
        params = self.request.params
        own = token in self.request.stop_ids and not params.ignore_eos
        if own or token in params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", None if own else token
            return ""
        text = "" if self._detokenizer is None else self._detokenizer.append(token)
        if self.state.generated > params.min_tokens:
            text, stop = self._stops.append(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.state.matcher is not None and self.finish_reason is None and self.state.matcher.done:
            self.finish_reason = "stop"
        return text

    def _rest(self) -> str:
        """Text that was held back; none behind a stop string."""
        if isinstance(self.stop_reason, str):
            return ""
        text = "" if self._detokenizer is None else self._detokenizer.finish()
        text, stop = self._stops.append(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            return text
        return text + self._stops.finish()

    def _chunk(self, tokens: list[int], text: str) -> Chunk:
        self.text += text
        params = self.request.params
        logprobs = self.logprobs[-len(tokens) :] if tokens and params.logprobs is not None else None
        usage = None if self.finish_reason is None else self.request.usage([self])
        return Chunk(
            self.state.index, tokens, text, self.finish_reason, self.stop_reason, logprobs, usage
        )  # fmt: skip


class Request:
    """All samples of one prompt. deadline: on the clock of time.monotonic()."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        deadline: float | None,
        handle: Handle[Any],
    ) -> None:
        self.prompt, self.params, self.stop_ids, self.tokenizer = prompt, params, stop_ids, tokenizer
        self.deadline, self.handle = deadline, handle
        self.samples: list[Sample] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.cancelled = False

    @property
    def live(self) -> list[Sample]:
        """Samples that go on."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    def usage(self, samples: list[Sample]) -> Usage:
        """With the tokens of these samples."""
        cached = self.samples[0].sequence.cached if self.samples else 0
        return Usage(len(self.prompt), sum(len(sample.token_ids) for sample in samples), cached)

    def output(self, error: Exception | None = None) -> RequestOutput:
        """Once all samples are finished."""
        samples = self.samples
        if self.params.samples > self.params.n:
            samples = sorted(samples, key=_mean_logprob, reverse=True)[: self.params.n]
        completions = [sample.completion() for sample in samples]
        if not completions:  # refused
            completions = [Completion(0, [], "", "error")]
        return RequestOutput(self.prompt, completions, self.usage(self.samples), self.prompt_logprobs, error)


def _mean_logprob(sample: Sample) -> float:
    values = [item.logprob for item in sample.logprobs]
    return sum(values) / len(values) if values else float("-inf")
