"""A request's state in the engine, and the handle that its caller has."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from untorch.llm.detokenizer import Detokenizer, StopStrings
from untorch.llm.outputs import Chunk, Completion, FinishReason, RequestOutput, Usage
from untorch.llm.params import SamplingParams
from untorch.llm.sampler import SampledToken, SamplerState, TokenLogprobs
from untorch.llm.sequence import Sequence
from untorch.llm.tokenizer import Tokenizer
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Generation", "Request", "Sample", "Wake"]


class Generation:
    """A request that was submitted: wait for its ``result()``, iterate over its chunks, or ``cancel()`` it.

    Iterate with ``for`` or ``async for``, once.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._result: RequestOutput | None = None
        # Threads and event loops that wait. Each looks once more when it is among them, so no change is missed.
        self._waiters: list[_Waiter] = []

    def cancel(self) -> None:
        """End it with the reason "cancelled" and the tokens that it has. Nothing happens if it is finished."""
        if self._result is None:
            self._cancel()

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises TimeoutError after ``timeout`` seconds; what made the request fail."""
        output = self.wait(timeout)
        if output.error is not None:
            raise output.error
        return output

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """As ``result``, but an error is in the output's ``error``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = _ThreadWaiter()
        self._waiters.append(waiter)
        try:
            while self._result is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the request has not finished after {timeout} seconds")
                waiter.wait(left)
        finally:
            self._waiters.remove(waiter)
        return self._result

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks. Raises what made the request fail."""
        waiter = _ThreadWaiter()
        self._waiters.append(waiter)
        try:
            while True:
                end = self._result  # before the chunks: those in front of it are there
                if not self._chunks and end is None:
                    waiter.wait(None)
                    continue
                while self._chunks:
                    yield self._chunks.popleft()
                if end is not None:
                    if end.error is not None:
                        raise end.error
                    return
        finally:
            self._waiters.remove(waiter)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks, without blocking the event loop. Raises what made the request fail."""
        waiter = _LoopWaiter(asyncio.get_running_loop())
        self._waiters.append(waiter)
        try:
            while True:
                end = self._result
                if not self._chunks and end is None:
                    await waiter.event.wait()
                    waiter.event.clear()
                    continue
                while self._chunks:
                    yield self._chunks.popleft()
                if end is not None:
                    if end.error is not None:
                        raise end.error
                    return
        finally:
            self._waiters.remove(waiter)

    def _push(self, woken: Wake, chunk: Chunk | None = None, result: RequestOutput | None = None) -> None:
        if chunk is not None:
            self._chunks.append(chunk)
        if result is not None:
            self._result = result
        if self._waiters:
            woken.add(self._waiters)


class _ThreadWaiter:
    """A thread that waits for a change. Wake-ups are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float | None) -> None:
        self._lock.acquire(timeout=-1 if timeout is None else timeout)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._lock.release()


class _LoopWaiter:
    """A task of an event loop that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.event = loop, asyncio.Event()


_Waiter = _ThreadWaiter | _LoopWaiter


class Wake:
    """Who is to be woken after a step: an event loop once, whatever the number of its tasks."""

    def __init__(self) -> None:
        self._threads: list[_ThreadWaiter] = []
        self._loops: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, waiters: Iterable[_Waiter]) -> None:
        """They have something to take."""
        for waiter in waiters:
            if isinstance(waiter, _ThreadWaiter):
                self._threads.append(waiter)
            else:
                self._loops.setdefault(waiter.loop, []).append(waiter.event)

    def now(self) -> None:
        """Wake them."""
        threads, loops = self._threads, self._loops
        if threads:
            self._threads = []
            for waiter in threads:
                waiter.wake()
        if loops:
            self._loops = {}
            for loop, events in loops.items():
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


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
        handle: Generation,
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


def check_tokens(prompt: Any, vocabulary: int) -> list[int]:
    """A prompt's token ids. Raises InvalidArgumentError."""
    ids = [int(token) for token in prompt]
    for at, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise InvalidArgumentError(
                f"prompt: token {at}: expected an id from 0 to {vocabulary - 1}, got {token}"
            )  # fmt: skip
    return ids
