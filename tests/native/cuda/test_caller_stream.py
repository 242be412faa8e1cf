"""untorch/caller_stream.h: one setting in the process, the thread's own, nested guards. No GPU is needed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.native.shim import library_path

ROOT = Path(__file__).resolve().parents[3]

SOURCE = r"""
#include <type_traits>
#include <untorch/caller_stream.h>

static_assert(std::is_trivially_copyable_v<decltype(untorch::getCallerStream())>);
static_assert(!std::is_copy_constructible_v<untorch::CallerStreamGuard>);

static CUstream_st* handle(long value) { return reinterpret_cast<CUstream_st*>(value); }

// The setting: -1 for none.
extern "C" long peek() {
  const auto stream = untorch::getCallerStream();
  return stream ? reinterpret_cast<long>(*stream) : -1;
}
extern "C" void set(long value) { untorch_caller_stream_exchange({handle(value), 1}); }
extern "C" void clear() { untorch_caller_stream_clear(); }

// Calls `inside` within a guard; a second guard inside the first, with its own call.
extern "C" void guarded(long value, void (*inside)()) {
  untorch::CallerStreamGuard guard(handle(value));
  inside();
}
"""


def build(folder: Path, name: str) -> ctypes.CDLL:
    source, out = folder / f"{name}.cpp", folder / f"lib{name}.so"
    source.write_text(SOURCE)
    library = Path(library_path()).resolve()
    include = next(p for p in (library.parent / "include", ROOT / "native" / "include") if (p / "untorch").is_dir())
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{include}", str(source), "-o", str(out)]
    command += [str(library.with_name("libuntorch_stream.so")), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(out), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    loaded.peek.restype = ctypes.c_long
    loaded.set.argtypes = [ctypes.c_long]
    loaded.guarded.argtypes = [ctypes.c_long, ctypes.CFUNCTYPE(None)]
    return loaded


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Two libraries that know nothing of each other."""
    folder = tmp_path_factory.mktemp("caller")
    return build(folder, "first"), build(folder, "second")


Two = tuple[ctypes.CDLL, ctypes.CDLL]


@pytest.fixture(autouse=True)
def nothing_is_set(two: Two) -> None:
    two[0].clear()


def test_there_is_one_setting_in_the_process(two: Two) -> None:
    first, second = two
    assert (first.peek(), second.peek()) == (-1, -1)
    first.set(0x1230)
    assert second.peek() == 0x1230
    second.set(0x4560)
    assert first.peek() == 0x4560
    second.clear()
    assert (first.peek(), second.peek()) == (-1, -1)


def test_the_null_stream_is_a_setting(two: Two) -> None:
    first, second = two
    first.set(0)
    assert second.peek() == 0
    first.clear()
    assert second.peek() == -1


def test_guards_nest_across_libraries(two: Two) -> None:
    first, second = two
    seen: list[int] = []

    def note() -> None:
        seen.append(second.peek())

    inner = ctypes.CFUNCTYPE(None)(note)

    def middle() -> None:
        seen.append(second.peek())
        second.guarded(0, inner)
        seen.append(first.peek())
        first.guarded(0x20, inner)
        seen.append(first.peek())

    first.guarded(0x10, ctypes.CFUNCTYPE(None)(middle))
    assert seen == [0x10, 0, 0x10, 0x20, 0x10]
    assert first.peek() == -1
    first.set(0x30)
    second.guarded(0x40, inner)
    assert (seen[-1], first.peek()) == (0x40, 0x30)


def test_threads_have_their_own(two: Two) -> None:
    first, second = two
    first.set(0x50)
    seen: dict[int, tuple[int, int]] = {}
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        before = second.peek()
        first.set(0x100 * number)
        gate.wait()
        seen[number] = (before, second.peek())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {i: (-1, 0x100 * i) for i in range(4)}
    assert second.peek() == 0x50


def test_asking_makes_nothing(two: Two) -> None:
    # Without a driver there is nothing that could be made: asking and clearing do not even look for one.
    first, _ = two
    maps = Path("/proc/self/maps")
    had_driver = "libcuda.so" in maps.read_text()
    for _ in range(1000):
        first.clear()
        assert first.peek() == -1
    assert ("libcuda.so" in maps.read_text()) is had_driver
