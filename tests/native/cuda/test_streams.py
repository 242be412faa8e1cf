"""Streams that a call enqueues on and what it waits for, as the fake driver records them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.fake_gpu import found

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

SCRIPT = """
import threading
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
def array(stream=None, device=0, rows=4):
    # As another library has it; its memory stays.
    fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    fake.cuCtxSetCurrent(context)
    assert fake.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(rows * 500 * 2)) == 0
    class Array:
        __cuda_array_interface__ = {"data": (pointer.value, False), "shape": (rows, 500), "typestr": "<f2",
                                    "strides": None, "version": 3, "stream": stream}
    return Array()
def events(call):
    before = len(fake.fake_events())
    call()
    return [[line.split()[0], int(line.split()[1])] for line in fake.fake_events()[before:].decode().splitlines()]
program = untorch.load(path)
program.int4(np.zeros((4, 500), np.float16))  # the library is open and its kernels are loaded
"""


def test_the_callers_stream(driver: Path, package: Path) -> None:
    """Everything is enqueued there, and nothing is waited for."""
    script = """
x = array()
def call():
    with untorch.stream(0xabc0):
        found["out"] = program.int4(x).__cuda_array_interface__["stream"]
found["events"] = events(call)
"""
    result = found(driver, package, SCRIPT + script)
    kinds = {kind for kind, _ in result["events"]}
    assert "launch" in kinds and not any(kind.startswith("synchronize") for kind in kinds)
    assert {stream for _, stream in result["events"]} == {0xABC0}
    assert result["out"] == 0xABC0


def test_streams_of_producers_and_consumers(driver: Path, package: Path) -> None:
    """The call waits for the stream that an array is ready on, a consumer's stream for the call's, and back."""
    script = """
results, kept = [], []
def call():
    with untorch.stream(0xabc0):
        results.append(program.int4(x))
def given(stream):
    return events(lambda: kept.append(results[0].__dlpack__(stream=stream)))
x = array(stream=0xdef0)
found["taken"] = events(call)
found["given"] = [given(stream) for stream in (0x1110, 0xabc0, -1)]
found["legacy"] = given(1)
kept = kept[:1]
found["back"] = events(kept.clear)
"""
    result = found(driver, package, SCRIPT + script)
    assert result["taken"][:2] == [["record", 0xDEF0], ["wait", 0xABC0]]
    assert {stream for _, stream in result["taken"][2:]} == {0xABC0}
    assert result["given"] == [[["record", 0xABC0], ["wait", 0x1110]], [], []]
    assert [kind for kind, _ in result["legacy"]] == ["record", "wait"]
    # Its memory is used again when the consumer's stream is done with it.
    assert result["back"] == [["record", 0x1110], ["wait", 0xABC0]]


def test_the_stream_of_a_types_c_functions(driver: Path, package: Path) -> None:
    """An array whose type has DLPack's C exchange is ready on its producer's current stream."""
    script = """
from tests import exchange
x = array()
data = x.__cuda_array_interface__["data"][0]
def given(stream, device=exchange.CUDA):
    kind = exchange.make_type(lambda _: exchange.describe(data, (4, 500), 16, device), stream=stream)
    kind.__dlpack__ = None  # it is not asked
    return kind()
def call(x):
    with untorch.stream(0xabc0):
        program.int4(x)
found["same"] = events(lambda: call(given(0xabc0)))
found["other"] = events(lambda: call(given(0xdef0)))
"""
    result = found(driver, package, SCRIPT + script)
    assert {stream for _, stream in result["same"]} == {0xABC0}
    assert "wait" not in {kind for kind, _ in result["same"]}
    assert result["other"][:2] == [["record", 0xDEF0], ["wait", 0xABC0]]


def test_numpy_waits_for_its_own_stream_alone(driver: Path, package: Path) -> None:
    script = """
def call():
    with untorch.stream(0xabc0):
        program.int4(np.zeros((4, 500), np.float16))
found["events"] = events(call)
"""
    events = found(driver, package, SCRIPT + script)["events"]
    assert {stream for kind, stream in events if kind != "synchronize_event"} == {0xABC0}
    assert "synchronize_device" not in {kind for kind, _ in events}


def test_threads_have_streams_of_their_own(driver: Path, package: Path) -> None:
    """Without a caller's stream; two threads at once never share one, nor is it the legacy default stream."""
    script = """
barrier, x = threading.Barrier(2), array()
def work(number):
    barrier.wait()
    def call():
        with untorch.stream(None):
            program.int4(x)
    found[number] = program.int4(x).__cuda_array_interface__["stream"]
    barrier.wait()
threads = [threading.Thread(target=work, args=(number,)) for number in ("first", "second")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    result = found(driver, package, SCRIPT + script)
    assert result["first"] != result["second"]
    assert all(stream > 2 for stream in result.values())


def test_an_array_of_another_gpu(driver: Path, package: Path) -> None:
    script = """
try:
    program.int4(array(device=1))
except untorch.InvalidArgumentError as error:
    found["error"] = str(error)
"""
    error = found(driver, package, SCRIPT + script)["error"]
    assert "cuda:1" in error and "cuda:0" in error


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
@pytest.mark.parametrize(("version", "launches"), [(13000, 4), (12030, 4), (12020, 0)])
def test_programmatic_dependent_launches(version: int, launches: int, kind: str, driver: Path, package: Path) -> None:
    """PDL for both layers' kernels and the two Triton kernels between them, where the driver can capture it in graphs."""
    script = f"""
import os
os.environ["UNTORCH_{kind.upper()}_SM90_M"] = "100000"
for kernel, rows in (("gemv", 1), ("gemm_sm90", 100)):
    before = fake.fake_pdl()
    untorch.load(path)[{kind!r}](np.zeros((rows, 500), np.float16))
    found[kernel] = fake.fake_pdl() - before
found["kernels"] = [sum(part in name for name in fake.fake_launches().decode().split()) for part in found]
"""
    result = found(driver, package, script, DRIVER=version)
    assert result == {"gemv": launches, "gemm_sm90": launches, "kernels": [2, 2]}
