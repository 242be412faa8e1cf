"""Pinned host memory, with a stand-in for the CUDA driver."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.runtime import pinned


class Driver:
    """Notes what is pinned, in which context; ``fails``: the status of a function."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.pinned: dict[int, int] = {}
        self.contexts: list[int] = []
        self.retained = 0

    def cuInit(self, flags: int) -> int:
        return self.fails.get("cuInit", 0)

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 40 + index
        return self.fails.get("cuDeviceGet", 0)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 7000 + device.value
        self.retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        assert device.value == 41
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.contexts.pop()
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:
        assert self.contexts == [7041] and flags == 1
        if status := self.fails.get("cuMemHostRegister_v2", 0):
            return status
        assert address.value % 4096 == 0 and address.value not in self.pinned
        self.pinned[address.value] = size.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        assert self.contexts == [7041]
        del self.pinned[address.value]
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of memory" if status == 2 else None
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made if name == "libcuda.so.1" else None)
    return made


@pytest.mark.slow
def test_copies_lie_in_pinned_memory(driver: Driver) -> None:
    buffers = pinned.PinnedBuffers(1)
    x = np.arange(3000, dtype=np.float32).reshape(30, 100)
    first = buffers.copy("x", x)
    np.testing.assert_array_equal(first, x)
    assert driver.pinned == {first.ctypes.data: 16384}
    second = buffers.copy("x", x.T[:50])  # strided, and smaller: the same memory, row-major
    assert second.ctypes.data == first.ctypes.data and second.flags.c_contiguous
    np.testing.assert_array_equal(second, x.T[:50])
    other = buffers.copy("y", np.ones(1, np.int64))
    assert driver.pinned[other.ctypes.data] == 4096 and len(driver.pinned) == 2
    larger = buffers.copy("x", np.ones(5000, np.float32))
    assert driver.pinned[larger.ctypes.data] == 32768 and len(driver.pinned) == 2
    assert buffers.copy("z", np.ones((0, 3))).shape == (0, 3)
    del buffers
    gc.collect()
    assert driver.pinned == {} and driver.retained == 0 and driver.contexts == []
    np.testing.assert_array_equal(larger, 1)  # memory that is no longer pinned stays memory


def test_errors(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = pinned.PinnedBuffers(1)
    driver.fails["cuMemHostRegister_v2"] = 2
    with pytest.raises(
        untorch.OutOfMemoryError,
        match="^pinning 1.0 MiB of host memory: out of memory: use smaller batches, or pinned=False$",
    ):
        buffers.copy("x", np.ones(1 << 20, np.uint8))
    assert driver.contexts == []
    driver.fails.clear()
    assert buffers.copy("x", np.ones(5))[0] == 1
    driver.fails["cuDeviceGet"] = 101
    with pytest.raises(untorch.UnsupportedError, match="^pinned memory: cuDeviceGet: CUDA error 101$"):
        pinned.PinnedBuffers(9)
    driver.fails["cuInit"] = 100
    with pytest.raises(untorch.UnsupportedError, match="^pinned memory needs a GPU: cuInit: CUDA error 100$"):
        pinned.PinnedBuffers(0)

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(untorch.UnsupportedError, match="^pinned memory needs a CUDA driver: libcuda.so.1: cannot open"):
        pinned.PinnedBuffers(0)
