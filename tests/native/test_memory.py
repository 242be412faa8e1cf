"""The CPU allocator: alignment, no aliasing between live tensors, reuse of freed blocks."""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest
import shim

SIZES = [1, 63, 64, 65, 4096, 65535, 65536, 65537, 300_000, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 70 << 20]


def new(nbytes: int) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    sizes, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    code = shim.lib.aoti_torch_empty_strided(
        ctypes.c_int64(1), sizes, strides, ctypes.c_int32(0), ctypes.c_int32(0), ctypes.c_int32(-1), ctypes.byref(out)
    )
    shim.raise_on(code)
    return out


def address(tensor: ctypes.c_void_p) -> int:
    data = ctypes.c_void_p()
    shim.raise_on(shim.lib.aoti_torch_get_data_ptr(tensor, ctypes.byref(data)))
    assert data.value is not None
    return data.value


@pytest.mark.parametrize("nbytes", SIZES)
def test_live_tensors_do_not_overlap(nbytes: int) -> None:
    for _ in range(3):
        tensors = [new(nbytes) for _ in range(12 if nbytes < (1 << 20) else 3)]
        starts = sorted(address(t) for t in tensors)
        assert all(start % 64 == 0 for start in starts)
        assert all(b - a >= nbytes for a, b in itertools.pairwise(starts))
        for t in tensors:
            ctypes.memset(address(t), 255, nbytes)  # all of it is writable
            shim.delete(t)


def test_blocks_freed_by_another_thread() -> None:
    tensors = [new(nbytes) for nbytes in SIZES for _ in range(3)]

    def work() -> None:
        for t in tensors:
            shim.delete(t)
        for nbytes in SIZES:
            shim.delete(new(nbytes))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    test_live_tensors_do_not_overlap(4096)
    test_live_tensors_do_not_overlap(300_000)


def test_threads_at_once() -> None:
    failures: list[int] = []

    def work(value: int) -> None:
        for nbytes in (100, 300_000) * 100:
            t = new(nbytes)
            ctypes.memset(address(t), value, nbytes)
            if ctypes.string_at(address(t), nbytes) != bytes([value]) * nbytes:
                failures.append(value)
            shim.delete(t)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_too_large() -> None:
    with pytest.raises(shim.ShimError) as caught:
        new(1 << 62)
    assert str(caught.value) == f"empty_strided: out of memory: could not allocate {1 << 62} bytes"
