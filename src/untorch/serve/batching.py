"""Dynamic batching: calls of one method are joined along dimension 0, run by a few threads, and split again.

A call waits in the queue of its kind: the dtypes of its inputs and their shapes without dimension 0. A runner takes
from one queue what fits into a batch. Kinds take turns, so that none waits for ever. A call that cannot be joined is of
a kind of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from untorch.runtime.errors import ClosedError, ModelError
from untorch.runtime.log import INFO, log
from untorch.serve.errors import DeadlineError, QueueFullError

__all__ = ["Batcher", "Call", "Observer"]

Array = NDArray[Any]


class Observer:
    """What a batcher tells of; the methods do nothing here. They are called by runner threads and must be quick."""

    def batch(self, calls: int, rows: int, seconds: float) -> None:
        """A batch ran, for so many seconds."""

    def waited(self, seconds: float) -> None:
        """A call left the queue."""

    def split(self, error: BaseException) -> None:
        """A joined call failed: its calls run alone."""


class Call:
    """One request: its inputs, and later its outputs or its error. ``done`` is called by the thread that ran it."""

    __slots__ = ("abandoned", "arrived", "deadline", "done", "error", "inputs", "kind", "outputs", "rows", "timeout")

    def __init__(
        self, inputs: Sequence[Array], kind: Hashable, rows: int, timeout: float | None, done: Callable[[Call], None]
    ) -> None:
        self.inputs = inputs
        self.kind = kind
        self.rows = rows
        self.arrived = time.monotonic()
        self.deadline = None if timeout is None else self.arrived + timeout
        self.timeout = timeout
        self.done = done
        self.outputs: list[Any] | None = None
        self.error: BaseException | None = None
        self.abandoned = False


class Batcher:
    """Runs the calls of one method.

    Args:
        run: The method: a list of arrays in, a list of arrays (or None) out. Called by several threads at a time.
        joins: Whether calls may be joined: every input and output has the batch as dimension 0.
        max_batch_size: Rows of a joined call.
        max_wait: Seconds that the first call of a batch waits for others while the batch is not full.
        max_queue: Calls that may wait.
        runners: Threads, and so concurrent calls.
        name: Of the model, for errors and threads' names.
        observer: Is told what happens.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Array]], list[Any]],
        *,
        joins: bool,
        max_batch_size: int = 32,
        max_wait: float = 0.0,
        max_queue: int = 1024,
        runners: int = 1,
        name: str = "model",
        observer: Observer | None = None,
    ) -> None:
        self._run = run
        self._joins = joins and max_batch_size > 1
        self._most_rows = max_batch_size
        self._max_wait = max_wait
        self._max_queue = max_queue
        self._name = name
        self._observer = observer or Observer()
        self._lock = threading.Lock()
        # In the place of a threading.Condition, whose Python takes as long as a small model: one item wakes one runner.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._idle = 0  # runners that wait, and that no item of the queue is meant for
        self._queues: OrderedDict[Hashable, deque[Call]] = OrderedDict()
        self._waiting = 0
        self._running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"untorch-{name}-{i}", daemon=True) for i in range(runners)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def joins(self) -> bool:
        """Whether calls are joined."""
        return self._joins

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return self._waiting

    @property
    def running(self) -> int:
        """Calls that are computed now."""
        return self._running

    def submit(
        self, inputs: Sequence[Array], done: Callable[[Call], None], timeout: float | None = None
    ) -> Call:  # fmt: skip
        """Adds a call and returns at once.

        Raises:
            QueueFullError: As many calls wait as may.
            ClosedError: The batcher is closed.
        """
        kind, rows = self._kind_of(inputs)
        call = Call(inputs, kind, rows, timeout, done)
        if kind is None:
            call.kind = id(call)
        with self._lock:
            if self._closed:
                raise ClosedError(f"model '{self._name}' is unloaded")
            if self._waiting >= self._max_queue:
                raise QueueFullError(f"model '{self._name}': {self._waiting} calls wait already: try again later")
            calls = self._queues.get(call.kind)
            if calls is None:
                calls = self._queues[call.kind] = deque()
            calls.append(call)
            self._waiting += 1
            self._wake()
        return call

    async def infer(self, inputs: Sequence[Array], timeout: float | None = None) -> list[Any]:
        """The outputs of a call. A cancelled one, or one whose time is over, is not computed if it still waits.

        Raises:
            QueueFullError: As many calls wait as may.
            DeadlineError: The outputs were not there in time.
            ClosedError: The batcher is closed.
        """
        inbox = _inbox_of(asyncio.get_running_loop())
        future: asyncio.Future[list[Any]] = inbox.loop.create_future()

        def done(call: Call) -> None:
            inbox.add(future, call)

        call = self.submit(inputs, done, timeout)
        timer = None if timeout is None else inbox.loop.call_later(timeout, self._expire, call, future)
        try:
            return await future
        finally:
            call.abandoned = True
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Takes no more calls, computes those that wait, and ends the threads."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._wake()
        for thread in self._threads:
            thread.join()

    def _expire(self, call: Call, future: asyncio.Future[list[Any]]) -> None:
        call.abandoned = True
        if not future.done():
            future.set_exception(self._too_late(call))

    def _too_late(self, call: Call) -> DeadlineError:
        return DeadlineError(f"model '{self._name}': the call was not computed within {call.timeout:.3g} s")

    def _kind_of(self, inputs: Sequence[Array]) -> tuple[Hashable, int]:
        """What calls have to have in common to be joined (None: it runs alone), and the rows."""
        if not self._joins or not inputs:
            return None, 1
        first = inputs[0].shape
        if not first or not 0 < first[0] < self._most_rows:
            return None, first[0] if first else 1
        rows = first[0]
        kind: list[Any] = []
        for array in inputs:
            shape = array.shape
            if not shape or shape[0] != rows:
                return None, rows
            kind += (array.dtype, shape[1:])
        return tuple(kind), rows

    def _wake(self) -> None:
        """Wakes a runner, if one waits. The lock is held."""
        if self._idle:
            self._idle -= 1
            self._wakes.put(None)

    def _wait(self, seconds: float | None) -> None:
        """Until a runner is woken, which ``_idle`` has counted, or the time is over."""
        try:
            self._wakes.get(timeout=seconds)
        except queue.Empty:
            with self._lock:
                if self._idle:
                    self._idle -= 1
                    return
            self._wakes.get()  # an item came meanwhile

    def _work(self) -> None:
        calls: list[Call] = []
        while calls := self._take(len(calls)):
            self._execute(calls)

    def _take(self, finished: int) -> list[Call]:
        """The calls of the next batch; empty: closed, and nothing is left. ``finished``: of the one before."""
        while True:
            calls: list[Call] = []
            late: list[Call] = []
            with self._lock:
                self._running -= finished
                finished = 0
                waiting, pause = self._next_queue()
                if waiting is not None:
                    calls, late = self._fill(waiting)
                    self._running += len(calls)
                    if self._queues:
                        self._wake()  # another runner may have missed its turn
                elif self._closed and not self._queues:
                    return []
                else:
                    self._idle += 1
            for call in late:
                call.error = self._too_late(call)
                self._finish(call)
            if calls:
                return calls
            if waiting is None:
                self._wait(pause)

    def _next_queue(self) -> tuple[deque[Call] | None, float | None]:
        """The queue whose turn it is; if there is none, the seconds until there will be one."""
        if not self._max_wait or self._closed:
            return next(iter(self._queues.values()), None), None
        now, soonest = time.monotonic(), None
        for calls in self._queues.values():
            head = calls[0]
            ripe = head.arrived + self._max_wait
            joinable = isinstance(head.kind, tuple)
            if not joinable or ripe <= now or self._is_full(calls):
                return calls, None
            soonest = ripe if soonest is None else min(soonest, ripe)
        return None, None if soonest is None else soonest - now

    def _is_full(self, waiting: deque[Call]) -> bool:
        if len(waiting) >= self._most_rows:
            return True
        return sum(call.rows for call in waiting) >= self._most_rows

    def _fill(self, waiting: deque[Call]) -> tuple[list[Call], list[Call]]:
        """What fits into a batch, and calls that are too late. Abandoned ones are dropped."""
        calls: list[Call] = []
        late: list[Call] = []
        rows = 0
        kind = waiting[0].kind
        now = time.monotonic()
        while waiting and (not calls or rows + waiting[0].rows <= self._most_rows):
            call = waiting.popleft()
            self._waiting -= 1
            if call.abandoned:
                continue
            if call.deadline is not None and call.deadline <= now:
                late.append(call)
                continue
            self._observer.waited(now - call.arrived)
            calls.append(call)
            rows += call.rows
        if waiting:
            self._queues.move_to_end(kind)
        else:
            del self._queues[kind]
        return calls, late

    def _execute(self, calls: list[Call]) -> None:
        begin = time.monotonic()
        if len(calls) == 1:
            rows = calls[0].rows
            self._run_alone(calls[0])
        else:
            rows = sum(call.rows for call in calls)
            try:
                self._run_joined(calls, rows)
            except Exception as error:
                self._observer.split(error)
                for call in calls:
                    call.outputs = None
                    self._run_alone(call)
        seconds = time.monotonic() - begin
        for call in calls:
            self._finish(call)
        self._observer.batch(len(calls), rows, seconds)

    def _finish(self, call: Call) -> None:
        try:
            call.done(call)
        except Exception as error:  # of the caller's: no reason to end the thread
            log(INFO, "model '%s': the callback of a call failed: %r", self._name, error)

    def _run_alone(self, call: Call) -> None:
        try:
            call.outputs = self._run(call.inputs)
        except Exception as error:
            call.error = error

    def _run_joined(self, calls: list[Call], rows: int) -> None:
        joined = [numpy.concatenate([call.inputs[i] for call in calls]) for i in range(len(calls[0].inputs))]
        outputs = self._run(joined)
        for output in outputs:
            if output is not None and (output.ndim == 0 or output.shape[0] != rows):
                raise ModelError(
                    f"model '{self._name}': expected outputs with {rows} rows for as many inputs, got {output.shape}"
                )
        begin = 0
        for call in calls:
            end = begin + call.rows
            call.outputs = [None if output is None else output[begin:end] for output in outputs]
            begin = end


class _Inbox:
    """Brings results to the futures of one event loop, with one wake-up for all that come meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[tuple[asyncio.Future[list[Any]], Call]] = deque()
        self._lock = threading.Lock()
        self._is_scheduled = False

    def add(self, future: asyncio.Future[list[Any]], call: Call) -> None:
        with self._lock:
            self._done.append((future, call))
            if self._is_scheduled:
                return
            self._is_scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody waits any more
            with self._lock:
                self._is_scheduled = False

    def _deliver(self) -> None:
        with self._lock:
            done, self._done = self._done, deque()
            self._is_scheduled = False
        for future, call in done:
            if future.done():
                continue
            if call.error is not None:
                future.set_exception(call.error)
            else:
                assert call.outputs is not None
                future.set_result(call.outputs)


_inboxes: dict[int, _Inbox] = {}


def _inbox_of(loop: asyncio.AbstractEventLoop) -> _Inbox:
    inbox = _inboxes.get(id(loop))
    if inbox is None or inbox.loop is not loop:
        for key in [key for key, old in _inboxes.items() if old.loop.is_closed()]:
            del _inboxes[key]
        inbox = _inboxes[id(loop)] = _Inbox(loop)
    return inbox
