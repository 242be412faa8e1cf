"""The kernels of libuntorch.so for tensors of torch: the operators of this package call them by raw pointers.

In eager PyTorch and under torch.compile an operator is then what it is in a ``.pt2`` file, bit for bit. On CUDA the
work is enqueued on torch's current stream, so that it can be captured into torch's CUDA graphs. Results go to memory
that torch allocated; the kernels' workspace comes from untorch's own memory pool, in the order of the stream.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from functools import cache
from typing import Any

import torch

from untorch import _core

__all__ = ["Raw", "Text", "call", "serves"]

# PyTorch's ScalarType codes.
_CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bfloat16: 15, torch.float8_e4m3fn: 24,
}  # fmt: skip
_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
_warned: set[str] = set()
_warning = threading.Lock()


class _CallerStream(ctypes.Structure):
    _fields_ = (("stream", ctypes.c_void_p), ("is_set", ctypes.c_int32))


class Raw:
    """What ctypes takes as it is, among the arguments of ``call``: an array, or a pointer to what is written."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Text(bytes):
    """A C string among the arguments of ``call``."""


@cache
def _library() -> ctypes.CDLL:
    """The libuntorch.so that the Python module has opened: the dynamic linker finds it by its name."""
    assert _core is not None
    library = ctypes.CDLL("libuntorch.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    library.torch_exception_get_what.restype = ctypes.c_char_p
    library.untorch_caller_stream_exchange.restype = _CallerStream
    library.untorch_caller_stream_exchange.argtypes = [_CallerStream]
    return library


@cache
def _has_cuda_kernels() -> bool:
    return hasattr(_library(), "aoti_torch_cuda_int4_linear")


def serves(operator: str, x: torch.Tensor) -> bool:
    """Whether the library computes the operator for activations ``x``; the reference has to, where it does not.

    It does in float32, bfloat16 and float16, on CPUs and on CUDA. A library that was built without CUDA does not on
    CUDA: that is told by a RuntimeWarning, once for an operator.
    """
    if x.dtype not in _ACTIVATIONS or x.numel() == 0 or x.device.type not in ("cpu", "cuda"):
        return False
    if x.device.type == "cpu" or _has_cuda_kernels():
        return True
    with _warning:
        first = operator not in _warned
        _warned.add(operator)
    if first:
        warnings.warn(
            f"untorch::{operator}: this untorch was built without CUDA, so its reference runs on {x.device}, which "
            "dequantizes the weights to float32 at every call: install the CUDA toolkit (nvcc) and reinstall untorch",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


class _Handles:
    """Handles on the memory of tensors, freed at the end of the block."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._made: list[ctypes.c_void_p] = []

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._made:
            self._library.aoti_torch_delete_tensor_object(handle)

    def of(self, tensor: torch.Tensor) -> ctypes.c_void_p:
        rank = tensor.dim()
        dims = ctypes.c_int64 * max(rank, 1)
        handle = ctypes.c_void_p()
        device = (1, tensor.device.index) if tensor.is_cuda else (0, -1)
        code = self._library.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(rank), dims(*tensor.shape), dims(*tensor.stride()),
            ctypes.c_int64(0), ctypes.c_int32(_CODES[tensor.dtype]), *map(ctypes.c_int32, device),
            ctypes.byref(handle),
        )  # fmt: skip
        _check(self._library, code)
        self._made.append(handle)
        return handle


def _check(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise RuntimeError(library.torch_exception_get_what().decode(errors="replace"))


def call(function: str, out: torch.Tensor, *arguments: Any) -> None:
    """Calls ``untorch_<function>(out, arguments…)``; raises RuntimeError with the library's message.

    arguments: Tensors, integers (int64), floats (double), Text, Raw; a tuple for an argument that may be absent, of one
        tensor, one float, or None.
    """
    library = _library()
    kept: list[Any] = []
    with _Handles(library) as handles:

        def converted(value: Any) -> Any:
            if isinstance(value, tuple):
                if value[0] is None:
                    return None
                inner = converted(value[0])
                kept.append(inner)
                return ctypes.byref(inner)
            if isinstance(value, torch.Tensor):
                return handles.of(value)
            if isinstance(value, Text):
                return ctypes.c_char_p(value)
            if isinstance(value, Raw):
                return value.value
            return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)

        given = [converted(value) for value in (out, *arguments)]
        entry = getattr(library, f"untorch_{function}")
        if not out.is_cuda:
            _check(library, entry(*given))
            return
        stream = torch.cuda.current_stream(out.device).cuda_stream
        before = library.untorch_caller_stream_exchange(_CallerStream(stream, 1))
        try:
            code = entry(*given)
        finally:
            library.untorch_caller_stream_exchange(before)
        _check(library, code)
