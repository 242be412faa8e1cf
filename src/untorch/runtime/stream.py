"""``untorch.stream`` and ``untorch.current_stream``: the CUDA stream that a thread's calls are enqueued on."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from untorch import _core
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["CurrentStream", "current_stream", "stream"]

_TAKEN = (
    "None, a cudaStream_t as an int, or an object with __cuda_stream__ (cuda.core), cuda_stream (PyTorch) or ptr (CuPy)"
)


class stream:  # noqa: N801 - a context manager, used like a function
    """Enqueue the calls of this thread on your CUDA stream, inside ``with untorch.stream(s):``.

    All work of a call is enqueued on the stream, and the call returns once it is enqueued. Without a stream the library
    uses one of its own for each thread. The setting is thread-local, nests, and ends with the block.

    Args:
        stream: A ``cudaStream_t`` as an int, or an object of another library: one with ``__cuda_stream__`` (cuda.core),
            ``cuda_stream`` (``torch.cuda.Stream``) or ``ptr`` (``cupy.cuda.Stream``). 0 is the legacy default stream;
            None is the library's own stream.

    Raises:
        ArgumentTypeError: The object has none of these.
        InvalidArgumentError: Its handle is not valid, or the context manager is entered twice.

    The object is kept alive by the block and by the tensors that its calls return. A stream given as an int must
    outlive both.
    """

    __slots__ = ("_before", "_handle", "_owner")

    def __init__(self, stream: Any) -> None:
        self._handle = _handle(stream)
        self._owner = None if stream is None or isinstance(stream, int) else stream
        self._before: tuple[int | None, Any] | None = None

    def __enter__(self) -> stream:
        if self._before is not None:
            raise InvalidArgumentError("stream: this context manager is entered already: create another one")
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


class CurrentStream:
    """A CUDA stream as other libraries take it: ``__cuda_stream__`` (cuda.core, CuPy), ``int(stream)`` (all others)."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)

    def __int__(self) -> int:
        """The ``cudaStream_t``; 0 is the legacy default stream."""
        return self._handle

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CurrentStream) and other._handle == self._handle

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        return f"<untorch.CurrentStream {self._handle:#x}>"


def current_stream(device: int = 0) -> CurrentStream:
    """The stream that a call made now by this thread is enqueued on; in a kernel for CUDA, that of the running call.

    It is the one of ``with untorch.stream(s):``, else the library's own for this thread and GPU. Kernels that are
    launched on it are in order with the model's::

        with cupy.cuda.ExternalStream(int(untorch.current_stream())):
            ...

    Args:
        device: The GPU's index. In a kernel it does not matter.

    Raises:
        UnsupportedError: There is no GPU.
    """
    handle = _core.call_stream(device)
    return CurrentStream(0 if handle == 1 else handle)  # 1 is the array API's number of the legacy stream


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
            raise ArgumentTypeError(f"stream: expected {_TAKEN}, got {type(value).__name__}")
        handle = int(handle)
    if isinstance(handle, bool):
        raise ArgumentTypeError(f"stream: expected {_TAKEN}, got {value!r}")
    if not 0 <= handle < 1 << 64:
        raise InvalidArgumentError(f"stream: expected {_TAKEN}, got {value!r}")
    return int(handle)
