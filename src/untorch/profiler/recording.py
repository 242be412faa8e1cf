"""Records ranges in the native library: calls, C functions, kernels, launches, graph replays."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from untorch import _core

__all__ = ["CALL", "FUNCTION", "KERNEL", "LAUNCH", "REPLAY", "Range", "Recording"]

CALL, FUNCTION, KERNEL, LAUNCH, REPLAY = range(5)


class Range(NamedTuple):
    """One range. Times are nanoseconds of CLOCK_MONOTONIC; ``device_…`` is -1 without a GPU's time.

    kind: CALL (a method's run), FUNCTION (a C function of the runtime), KERNEL (a loop of the model's library), LAUNCH
    (of a kernel on a GPU), REPLAY (of a CUDA graph). captured: in a graph; ``begin`` and ``end`` are the capture's.
    """

    name: str
    function: str
    kind: int
    captured: bool
    thread: int
    begin: int
    end: int
    device_begin: float
    device_end: float

    @property
    def has_device_time(self) -> bool:
        """Whether a GPU's time was measured."""
        return self.device_begin >= 0 and self.device_end >= self.device_begin


class Recording:
    """A context in which everything is recorded. Raises UnsupportedError if another records already.

    device: the index of the GPU whose work is timed; None: the host alone. The loops of a model's library are recorded
    if it is opened meanwhile.
    """

    def __init__(self, device: int | None = None) -> None:
        self._device = device
        self.dropped = 0

    def __enter__(self) -> Recording:
        _core.profile_start(-1 if self._device is None else self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _core.profile_stop()

    def collect(self) -> list[Range]:
        """What ended since the last time, in the order of begin. Waits for the GPU."""
        ranges, dropped = _core.profile_collect()
        self.dropped += dropped
        return sorted((Range(*values) for values in ranges), key=lambda range_: (range_.begin, -range_.end))
