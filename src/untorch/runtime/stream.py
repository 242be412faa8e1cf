"""``stream``: on which CUDA stream the calls of a thread run."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from untorch import _core
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["stream"]

_TAKEN = (
    "None, a cudaStream_t as an int, or an object with __cuda_stream__ (cuda.core), cuda_stream (PyTorch) or ptr (CuPy)"
)


class stream:  # noqa: N801 - a context manager, used like a function
    """Run the calls of this thread on a CUDA stream of yours, inside ``with untorch.stream(s):``.

    Everything that a call does is enqueued on the stream, and the call returns when that is done. Without a stream the
    library uses one of its own for each thread. Settings are the thread's, nest, and end with the block.

    Args:
        stream: A ``cudaStream_t`` as an int, or an object of another library: one with ``__cuda_stream__`` (cuda.core),
            ``cuda_stream`` (``torch.cuda.Stream``) or ``ptr`` (``cupy.cuda.Stream``). 0 is the legacy default stream.
            None, which is not the same, takes the library's own stream inside of the block.

    The object is kept while it is set, and by the tensors that calls on it return. A stream given as an int must exist
    for as long.
    """

    __slots__ = ("_before", "_handle", "_owner")

    def __init__(self, stream: Any) -> None:
        self._handle = _handle(stream)
        self._owner = None if stream is None or isinstance(stream, int) else stream
        self._before: tuple[int | None, Any] | None = None

    def __enter__(self) -> stream:
        if self._before is not None:
            raise InvalidArgumentError("this untorch.stream is entered already: make another one")
        self._before = _core.exchange_stream(self._handle, self._owner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._before is not None
        before, self._before = self._before, None
        _core.exchange_stream(*before)

    def __repr__(self) -> str:
        return f"untorch.stream({self._handle if self._handle is None else hex(self._handle)})"


def _handle(value: Any) -> int | None:
    if value is None:
        return None
    handle: Any = value
    if not isinstance(value, int):
        if (protocol := getattr(value, "__cuda_stream__", None)) is not None:
            pair = protocol() if callable(protocol) else protocol
            if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] == 0):
                raise InvalidArgumentError(
                    f"stream: __cuda_stream__ of {type(value).__name__} gave {pair!r}, expected (0, handle)"
                )
            handle = pair[1]
        elif hasattr(value, "cuda_stream"):
            handle = value.cuda_stream
        elif hasattr(value, "ptr"):
            handle = value.ptr
        if not hasattr(type(handle), "__int__") or handle is value:
            raise InvalidArgumentError(f"stream: expected {_TAKEN}, got {type(value).__name__}")
        handle = int(handle)
    if isinstance(handle, bool) or not 0 <= handle < 1 << 64:
        raise InvalidArgumentError(f"stream: expected {_TAKEN}, got {value!r}")
    return int(handle)
