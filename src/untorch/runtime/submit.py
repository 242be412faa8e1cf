"""``Method.submit``: calls for asyncio, on a bounded pool of threads. asyncio is imported at the first use."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from untorch import _core
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.process import Lock

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from untorch.runtime.method import Method

__all__ = ["Lane", "submit", "submit_run"]

_MOST_THREADS = 64


class Lane:
    """Submitted calls that wait for each other: at most ``width`` run at a time, in the order of their submission.

    A call that the library would let wait (for a runner, or for a session) does not occupy a thread.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._lock = Lock()
        self._waiting: deque[_Call] = deque()
        self._steps = 0
        self._process = os.getpid()

    def add(self, call: _Call) -> None:
        """Queue a call, and start a step for it unless ``width`` of them run."""
        with self._lock:
            if self._process != os.getpid():  # in a forked child neither threads nor event loops of the parent exist
                self._waiting.clear()
                self._steps, self._process = 0, os.getpid()
            self._waiting.append(call)
            if self._steps == self._width:
                return
            self._steps += 1
        try:
            _executor().submit(self._step)
        except BaseException:
            with self._lock:
                self._steps -= 1
                if call in self._waiting:
                    self._waiting.remove(call)
            raise

    def _step(self) -> None:
        """One call. Between two calls of a lane, those of other lanes get the thread."""
        with self._lock:
            call = self._waiting.popleft() if self._waiting else None
        if call is not None:
            call.run()
            del call  # an idle thread keeps no arrays
        with self._lock:
            if not self._waiting:
                self._steps -= 1
                return
        try:
            _executor().submit(self._step)
        except RuntimeError:  # the interpreter exits, and with it the loops that wait
            with self._lock:
                self._steps -= 1
                self._waiting.clear()


class _Call:
    """A submitted call. After a cancellation it does not begin, and keeps no arrays."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._loop = loop
        self._future = future
        future.add_done_callback(self._forget)

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._work = None

    def run(self) -> None:
        work, self._work = self._work, None
        if work is None or self._future.cancelled() or self._loop.is_closed():
            return
        try:
            result, error = work(), None
        except BaseException as raised:  # SystemExit of a Python kernel must not end the thread silently, either
            result, error = None, raised
        try:
            self._loop.call_soon_threadsafe(self._deliver, result, error)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits
            return
        finally:
            del work, result, error

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self._future.done():  # cancelled meanwhile
            return
        if error is None:
            self._future.set_result(result)
        elif isinstance(error, StopIteration):  # a future does not take it
            wrapped = RuntimeError("the call raised StopIteration")
            wrapped.__cause__ = error
            self._future.set_exception(wrapped)
        else:
            self._future.set_exception(error)


def submit_run(method: Method, inputs: list[Any]) -> asyncio.Future[list[Any]]:
    """Queue ``method.run``, the call with the flat inputs; a future of the flat outputs."""
    return submit(method, method._lane(), (inputs,), {}, call=method.run)


def submit(
    method: Method,
    lane: Lane,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Callable[..., Any] | None = None,
) -> asyncio.Future[Any]:
    """Queue a call of the method, or of ``call``; a future of the running event loop."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidArgumentError(
            f"method '{method.name}': submit needs a running event loop: await it in a coroutine, or call the method "
            "itself"
        ) from None
    run = method if call is None else call
    if method.device == "cpu":

        def work() -> Any:
            return run(*args, **kwargs)

    else:
        work = _on_gpu(method.device, run, args, kwargs)
    future: asyncio.Future[Any] = loop.create_future()
    lane.add(_Call(work, loop, future))
    return future


def _on_gpu(device: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The call on the stream of the thread that submits it, and the wait for its results.

    Arrays of other libraries are taken now: they order their work by the stream that is theirs on this thread.
    """
    index = int(device.partition(":")[2] or 0)
    _, owner = before = _core.exchange_stream(None, None)
    _core.exchange_stream(*before)
    number = _core.call_stream(index)
    handle = 0 if number == 1 else number  # 1 is the array API's number of the legacy stream
    args, kwargs = _taken(args, number), _taken(kwargs, number)

    def work() -> Any:
        outer = _core.exchange_stream(handle, owner)
        try:
            result = run(*args, **kwargs)
            _core.synchronize(index, number)
        finally:
            _core.exchange_stream(*outer)
        return result

    return work


class _Taken:
    """An array on a GPU, whose producer has ordered its work before the stream of the call."""

    __slots__ = ("_capsule", "_device", "_owner")

    def __init__(self, array: Any, stream: int, device: tuple[int, int]) -> None:
        self._owner = array
        self._device = device
        try:
            self._capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # a producer older than DLPack 1.0
            self._capsule = array.__dlpack__(stream=stream)

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


_CUDA, _CUDA_MANAGED = 2, 13  # DLDeviceType


def _taken(value: Any, stream: int) -> Any:
    """The tree of arguments with arrays on GPUs taken. ``Tensor`` knows its stream on every thread."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(_taken(item, stream) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_taken(item, stream) for item in value))
    if isinstance(value, dict):
        items = {key: _taken(item, stream) for key, item in value.items()}
        return items if kind is dict else value.__class__(items)
    if isinstance(value, _core.Tensor) or not hasattr(value, "__dlpack__"):
        return value
    ask = getattr(value, "__dlpack_device__", None)
    device = tuple(map(int, ask())) if ask is not None else (1, 0)
    if len(device) != 2 or device[0] not in (_CUDA, _CUDA_MANAGED):
        return value
    return _Taken(value, stream, device)


_pool: ThreadPoolExecutor | None = None
_pool_lock = Lock()


def _executor() -> ThreadPoolExecutor:
    """The process's threads for submitted calls: started when they are needed, joined when the interpreter exits."""
    global _pool
    with _pool_lock:
        if _pool is None:
            from concurrent.futures import ThreadPoolExecutor

            _pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="untorch-submit")
        return _pool


def _renew_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_renew_pool)
