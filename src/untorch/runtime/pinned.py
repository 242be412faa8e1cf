"""Pinned host memory for inputs of GPU methods, by the CUDA driver: copies from it run at the bus's full speed."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

from untorch.runtime.errors import OutOfMemoryError, UnsupportedError

__all__ = ["PinnedBuffers"]

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts


class PinnedBuffers:
    """Arrays in pinned memory by a key; one is overwritten by the next of its key, and grows as is needed.

    For one thread at a time. The memory is given back with the object.

    Args:
        index: The GPU whose primary context pins the memory.

    Raises:
        UnsupportedError: There is no CUDA driver, or no such GPU.
    """

    def __init__(self, index: int) -> None:
        self._driver = _driver()
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), index)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._buffers: dict[Any, tuple[mmap.mmap, int]] = {}
        weakref.finalize(self, _release, self._driver, self._context, self._device, self._buffers)

    def copy(self, key: Any, array: Any) -> Any:
        """The NumPy array's values in pinned memory; valid until the next call with this key.

        Raises:
            OutOfMemoryError: The system does not pin that much.
        """
        import numpy

        memory, size = self._buffers.get(key, (None, 0))
        if memory is None or size < array.nbytes:
            memory = self._grow(key, array.nbytes)
        pinned = numpy.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        numpy.copyto(pinned, array)
        return pinned

    def _grow(self, key: Any, nbytes: int) -> mmap.mmap:
        if (old := self._buffers.pop(key, None)) is not None:
            _unpin(self._driver, self._context, old)
        size = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())
        memory = mmap.mmap(-1, size)
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            status = self._driver.cuMemHostRegister_v2(_address(memory), ctypes.c_size_t(size), _PORTABLE)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        if status != 0:
            raise OutOfMemoryError(
                f"pinning {size / 2**20:.1f} MiB of host memory: {_text(self._driver, status)}: use smaller batches, "
                "or pinned=False"
            )
        self._buffers[key] = memory, size
        return memory

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise UnsupportedError(f"pinned memory: {name}: {_text(self._driver, status)}")


def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(f"pinned memory needs a CUDA driver: {error}") from error
    if (status := driver.cuInit(0)) != 0:
        raise UnsupportedError(f"pinned memory needs a GPU: cuInit: {_text(driver, status)}")
    return driver


def _text(driver: Any, status: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    return text.value.decode() if text.value is not None else f"CUDA error {status}"


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    # Through NumPy's view and not ctypes', which would hold the mapping as long as it lives.
    import numpy

    return ctypes.c_void_p(numpy.frombuffer(memory, numpy.uint8).ctypes.data)


def _unpin(driver: Any, context: Any, buffer: tuple[mmap.mmap, int]) -> None:
    """Errors are the driver's at its end: the memory is unpinned with the process then."""
    driver.cuCtxPushCurrent_v2(context)
    driver.cuMemHostUnregister(_address(buffer[0]))
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _release(driver: Any, context: Any, device: Any, buffers: dict[Any, tuple[mmap.mmap, int]]) -> None:
    for buffer in buffers.values():
        _unpin(driver, context, buffer)
    buffers.clear()
    driver.cuDevicePrimaryCtxRelease_v2(device)
