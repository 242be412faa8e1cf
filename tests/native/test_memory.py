"""The CPU allocator: alignment, no aliasing between live tensors, reuse of freed blocks."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

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


# Nothing is kept there, so that invalid accesses are found.
caching = pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="needs the cache of freed memory")


@caching
def test_a_freed_block_serves_smaller_tensors_of_half_its_size() -> None:
    large = new(24 << 20)
    place = address(large)
    shim.delete(large)
    smaller, other = new(13 << 20), new(24 << 20)
    assert address(smaller) == place != address(other)
    shim.delete(other)
    tiny = new(1 << 20)
    assert not place <= address(tiny) < place + (24 << 20)
    for t in (smaller, tiny):
        ctypes.memset(address(t), 255, 1 << 20)
        shim.delete(t)


# Of a process of its own, as what was in use before counts: kept is as much as was once in use at a time.
KEPT = """
import ctypes, resource, sys
import shim
from test_memory import new, address

def touched(sizes):
    tensors = [new(nbytes) for nbytes in sizes]
    for tensor, nbytes in zip(tensors, sizes):
        ctypes.memset(address(tensor), 1, nbytes)
    for tensor in tensors:
        shim.delete(tensor)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

before = resident()
touched([100 << 20, 60 << 20])
kept = resident() - before
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    touched([100 << 20, 60 << 20])
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
for nbytes in range(70 << 20, 100 << 20, 1 << 20):
    touched([nbytes])
print(kept, faults, resident() - before)
"""


@pytest.mark.slow
@caching
def test_no_more_is_kept_than_was_in_use() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", KEPT], cwd=here, capture_output=True, text=True, check=False,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept, faults, at_last = map(int, done.stdout.split())
    assert 150 <= kept <= 180 and at_last <= 180
    assert faults < 1000  # of 40,960 pages each time
