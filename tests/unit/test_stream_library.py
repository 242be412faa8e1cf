"""libuntorch_stream.so: a library of its own, with one setting for a thread that all of the process see."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import untorch
from tests.unit.test_embedding import include_directory, stream_library
from untorch.cli.process import library_path
from untorch.runtime.elf import read_elf

# Two engines that know of each other nothing, and nothing of libuntorch. The C one has the functions alone.
C_SOURCE = """
#include <untorch/caller_stream.h>
long peek(void) {
  const untorch_caller_stream setting = untorch_caller_stream_peek();
  return setting.is_set ? (long)(intptr_t)setting.stream : -1;
}
long exchange(long value) {
  const untorch_caller_stream setting = {(struct CUstream_st*)(intptr_t)value, 1};
  const untorch_caller_stream before = untorch_caller_stream_exchange(setting);
  return before.is_set ? (long)(intptr_t)before.stream : -1;
}
void clear(void) { untorch_caller_stream_clear(); }
"""
CPP_SOURCE = """
#include <untorch/caller_stream.h>
static CUstream_st* handle(long value) { return reinterpret_cast<CUstream_st*>(value); }
extern "C" long peek() {
  const auto stream = untorch::getCallerStream();
  return stream ? reinterpret_cast<long>(*stream) : -1;
}
extern "C" void guarded(long value, void (*inside)()) {
  const untorch::CallerStreamGuard guard(handle(value));
  inside();
}
"""
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]


def build(folder: Path, name: str, source: str, compiler: str, version: str) -> Path:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"needs {compiler}")
    file, out, library = folder / name, folder / f"lib{name.replace('.', '_')}.so", stream_library()
    file.write_text(source)
    command = [found, f"-std={version}", *STRICT, "-shared", "-fPIC", "-Wl,--no-undefined", f"-I{include_directory()}"]
    subprocess.run([*command, str(file), "-o", str(out), str(library), f"-Wl,-rpath,{library.parent}"], check=True)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("consumers")
    return build(folder, "one.c", C_SOURCE, "cc", "c99"), build(folder, "two.cpp", CPP_SOURCE, "c++", "c++17")


@pytest.fixture
def consumers(built: tuple[Path, Path]) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    first, second = (ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW) for path in built)
    for library in (first, second):
        library.peek.restype = ctypes.c_long
    first.exchange.restype = ctypes.c_long
    first.exchange.argtypes = [ctypes.c_long]
    second.guarded.argtypes = [ctypes.c_long, ctypes.CFUNCTYPE(None)]
    first.clear()
    return first, second


def test_it_needs_the_c_library_alone(built: tuple[Path, Path]) -> None:
    stream = read_elf(stream_library())
    exported = {"untorch_caller_stream_peek", "untorch_caller_stream_exchange", "untorch_caller_stream_clear"}
    assert exported <= set(stream.exported())
    if not any("san" in name for name in stream.needed):  # sanitizers bring libraries of their own
        assert set(stream.needed) <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
        assert stream_library().stat().st_size < 64 * 1024
    assert "libuntorch_stream.so" in read_elf(library_path()).needed
    assert exported & set(read_elf(library_path()).exported()) == set(), "the thread-local would exist twice"
    for path in built:
        needed = read_elf(path).needed
        assert "libuntorch_stream.so" in needed and "libuntorch.so" not in needed


def test_libuntorch_finds_it_in_its_own_folder(tmp_path: Path) -> None:
    """Without a path of the build tree, as installed: copies in one folder, in a process without untorch."""
    for path in (library_path(), stream_library()):
        shutil.copy(path.resolve(), tmp_path / path.name)
    code = f"""
        import ctypes
        library = ctypes.CDLL({str(tmp_path / "libuntorch.so")!r})
        library.untorch_version.restype = ctypes.c_char_p
        print(library.untorch_version().decode())
        print(*sorted({{l.split()[-1] for l in open("/proc/self/maps") if "libuntorch" in l}}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    version, mapped = done.stdout.splitlines()
    assert version == untorch.__version__
    assert mapped.split() == [str(tmp_path / "libuntorch.so"), str(tmp_path / "libuntorch_stream.so")]


def test_python_and_both_consumers_see_one_setting(consumers: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    first, second = consumers
    assert (first.peek(), second.peek()) == (-1, -1)
    with untorch.stream(0x1230):
        assert (first.peek(), second.peek()) == (0x1230, 0x1230)
        assert first.exchange(0x4560) == 0x1230
        with untorch.stream(0):
            assert (first.peek(), second.peek()) == (0, 0)
        assert second.peek() == 0x4560, "Python restored what the consumer had set"
    assert (first.peek(), second.peek()) == (-1, -1)
    seen: list[object] = []

    def inside() -> None:
        from untorch import _core

        before, _ = _core.exchange_stream(None, None)
        seen.append(before)
        _core.exchange_stream(before, None)
        seen.append(first.peek())

    second.guarded(0x70, ctypes.CFUNCTYPE(None)(inside))
    assert seen == [0x70, 0x70]
    assert first.peek() == -1


def in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    results: list[object] = [None] * count
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        gate.wait(60)
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_each_thread_has_its_own(consumers: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    first, second = consumers
    first.exchange(0x50)
    gate = threading.Barrier(8)

    def work(number: int) -> tuple[int, ...]:
        before = second.peek()
        first.exchange(0x100 * (number + 1))
        gate.wait(60)
        with untorch.stream(0x10 + number):
            gate.wait(60)
            inner = second.peek()
        gate.wait(60)
        return before, inner, second.peek()

    assert in_threads(8, work) == [(-1, 0x10 + i, 0x100 * (i + 1)) for i in range(8)]
    assert second.peek() == 0x50
    first.clear()


CHILD = """
import ctypes, os, sys
order, one, two, library = sys.argv[1:]
def consumers():
    return [ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW) for path in (one, two)]
def runtime():
    import untorch
    return untorch
def plain():
    return ctypes.CDLL(library, mode=os.RTLD_LOCAL | os.RTLD_NOW)
parts = {}
for step in order.split():
    parts[step] = {"consumers": consumers, "untorch": runtime, "library": plain}[step]()
first, second = parts["consumers"]
first.peek.restype = second.peek.restype = ctypes.c_long
first.exchange.argtypes = [ctypes.c_long]
print(first.peek(), second.peek())
if "untorch" in parts:
    with parts["untorch"].stream(0x1230):
        print(first.peek(), second.peek())
first.exchange(0x4560)
if "library" in parts:
    class Setting(ctypes.Structure):
        _fields_ = (("stream", ctypes.c_void_p), ("is_set", ctypes.c_int32))
    parts["library"].untorch_caller_stream_peek.restype = Setting
    setting = parts["library"].untorch_caller_stream_peek()
    print(setting.stream, setting.is_set)
print(second.peek())
print(len({l.split()[-1] for l in open("/proc/self/maps") if "libuntorch_stream" in l}))
"""


@pytest.mark.parametrize(
    "order",
    [
        "consumers", "untorch consumers", "consumers untorch", "library consumers", "consumers library",
        "untorch library consumers", "library untorch consumers", "consumers library untorch",
    ],
)  # fmt: skip
def test_in_any_order_of_loading(built: tuple[Path, Path], order: str) -> None:
    """libuntorch.so by its path, as with UNTORCH_LIBRARY, beside Python's untorch."""
    command = [sys.executable, "-c", CHILD, order, *map(str, built), os.environ.get("UNTORCH_LIBRARY", library_path())]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    expected = ["-1 -1"]
    if "untorch" in order:
        expected.append(f"{0x1230} {0x1230}")
    if "library" in order:
        expected.append(f"{0x4560} 1")
    assert done.stdout.splitlines() == [*expected, str(0x4560), "1"]


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C CXX)
find_package(untorch CONFIG REQUIRED)
add_library(one SHARED one.c)
target_link_libraries(one PRIVATE untorch::stream)
add_library(both SHARED two.cpp)
target_link_libraries(both PRIVATE untorch::untorch)
"""


@pytest.mark.slow
def test_the_cmake_targets(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake is not None, "cmake is in requirements-test.txt"
    installed = tmp_path / "untorch"
    (installed / "cmake").mkdir(parents=True)
    source = Path(untorch.cmake_dir()) / "untorchConfig.cmake"
    if not source.is_file():
        source = Path(__file__).resolve().parents[2] / "cmake" / "untorchConfig.cmake"
    shutil.copy(source, installed / "cmake")
    (installed / "include").symlink_to(include_directory())
    for path in (library_path(), stream_library()):
        (installed / path.name).symlink_to(path.resolve())
    project = tmp_path / "project"
    project.mkdir()
    for name, text in (("CMakeLists.txt", CMAKE), ("one.c", C_SOURCE), ("two.cpp", CPP_SOURCE)):
        (project / name).write_text(text)
    configure = [cmake, "-S", str(project), "-B", str(project / "build"), f"-Duntorch_DIR={installed / 'cmake'}"]
    for command in (configure, [cmake, "--build", str(project / "build")]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    needed = read_elf(project / "build" / "libone.so").needed
    assert "libuntorch_stream.so" in needed and "libuntorch.so" not in needed
    assert "libuntorch_stream.so" in read_elf(project / "build" / "libboth.so").needed
    (installed / "libuntorch_stream.so").unlink()
    shutil.rmtree(project / "build")
    done = subprocess.run(configure, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "libuntorch_stream.so does not exist: install untorch" in " ".join(done.stderr.split())
