"""Handles of requests that were submitted: threads and tasks wait on them while the engine's thread goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from untorch.llm.outputs import Chunk, RequestOutput

__all__ = ["Generation", "Handle", "Wake"]


class _Result(Protocol):
    @property
    def error(self) -> Exception | None: ...


Output = TypeVar("Output", bound=_Result)


class Handle(Generic[Output]):
    """A request that was submitted: wait for its ``result()``, ``await`` it, or ``cancel()`` it."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._result: Output | None = None
        # Threads and tasks that wait. Each looks once more when it is among them, so no change is missed.
        self._waiters: list[_Waiter] = []

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

    def __await__(self) -> Generator[Any, None, Output]:
        """The result, without blocking the event loop. Raises what made the request fail.

        Cancelling the task, as asyncio.wait_for does after its timeout, cancels the request; asyncio.shield leaves it.
        """
        return self._finished().__await__()

    async def _finished(self) -> Output:
        waiter = _LoopWaiter(asyncio.get_running_loop())
        self._waiters.append(waiter)
        try:
            while self._result is None:
                await waiter.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._waiters.remove(waiter)
        return self.result()

    def _push(self, woken: Wake, chunk: Chunk | None = None, result: Output | None = None) -> None:
        if chunk is not None:
            self._chunks.append(chunk)
        if result is not None:
            self._result = result
        if self._waiters:
            woken.add(self._waiters)


class Generation(Handle[RequestOutput]):
    """A request that was submitted: wait for its ``result()``, iterate over its chunks, or ``cancel()`` it.

    Iterate with ``for`` or ``async for``, once.
    """

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
                    await waiter.wait()
                    continue
                while self._chunks:
                    yield self._chunks.popleft()
                if end is not None:
                    if end.error is not None:
                        raise end.error
                    return
        finally:
            self._waiters.remove(waiter)


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

    async def wait(self) -> None:
        await self.event.wait()
        self.event.clear()


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
