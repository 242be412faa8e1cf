"""A kernel that keeps a stream busy until a test releases it, and threads whose errors are raised in the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy
import pytest

if TYPE_CHECKING:  # processes without torch use this module, too
    import torch

_SOURCE = r"""
extern "C" __global__ void spin(volatile int* flag, unsigned long long limit) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    if (*flag != 0) return;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < limit);
}
"""
SECONDS = 5.0


class Spin:
    """A kernel that runs on the stream from entering the block until ``release()``, at most ``seconds``.

    A caller that synchronizes with the stream finds ``running`` false afterwards: only the limit can have ended the
    kernel. Kernels launched meanwhile must be loaded already: loading one may wait for those that run.
    """

    _kernel: Any = None

    def __init__(self, stream: Any, seconds: float = SECONDS) -> None:
        self._cupy = pytest.importorskip("cupy")
        self._handle = int(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)))
        self._limit = int(seconds * 1e9)

    def __enter__(self) -> Spin:
        self._memory = self._cupy.cuda.alloc_pinned_memory(4)
        self._flag = numpy.frombuffer(self._memory, numpy.int32, 1)
        self._flag[0] = 0
        if Spin._kernel is None:
            Spin._kernel = self._cupy.RawKernel(_SOURCE, "spin")
            Spin._kernel.compile()
        cuda = self._cupy.cuda
        self._stream = cuda.ExternalStream(self._handle) if self._handle != 0 else cuda.Stream.null
        self._event = cuda.Event(disable_timing=True)
        with self._stream:
            Spin._kernel((1,), (1,), (numpy.uint64(self._memory.ptr), numpy.uint64(self._limit)))
        self._event.record(self._stream)
        return self

    @property
    def running(self) -> bool:
        return not self._event.done

    def release(self) -> None:
        self._flag[0] = 1

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        self._stream.synchronize()


def passes(event: torch.cuda.Event, spin: Spin) -> bool:
    """Whether the event completes while the kernel still runs."""
    while spin.running:
        if event.query():
            return spin.running
    return False


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """``work(number)`` in so many threads that start together; the first error is raised here."""
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def guarded(number: int) -> None:
        try:
            gate.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
