"""Tests of untorch.stream, and of the stream that producers of arrays are asked for; no GPU is needed."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import untorch
from untorch import _core


def setting() -> Any:
    """What is set on this thread."""
    before = _core.exchange_stream(None, None)
    _core.exchange_stream(*before)
    return before[0]


class Core:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CoreProperty(Core):
    __cuda_stream__ = property(lambda self: (0, self.handle))  # type: ignore[assignment]


class Torch:
    cuda_stream = 0x70C4


class Cupy:
    ptr = 0xC0B1


@pytest.mark.parametrize(
    ("given", "handle"),
    [(0, 0), (1, 1), (2, 2), (0x1234, 0x1234), (2**64 - 1, 2**64 - 1), (Core(0x99), 0x99), (CoreProperty(0), 0),
     (Torch(), 0x70C4), (Cupy(), 0xC0B1), (np.int64(7), 7) if isinstance(np.int64(7), int) else (7, 7)],
)  # fmt: skip
def test_what_a_stream_can_be(given: Any, handle: int) -> None:
    assert setting() is None
    with untorch.stream(given) as entered:
        assert setting() == handle
        assert hex(handle) in repr(entered)
    assert setting() is None


class Version1:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 1, 5


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("0", "expected None, a cudaStream_t as an int, or an object with __cuda_stream__ (cuda.core), cuda_stream "
              "(PyTorch) or ptr (CuPy), got str"),
        (1.5, "got float"),
        (-1, "got -1"),
        (2**64, "got 18446744073709551616"),
        (True, "got True"),
        (object(), "got object"),
        (Version1(), "__cuda_stream__ of Version1 gave (1, 5), expected (0, handle)"),
    ],
)  # fmt: skip
def test_what_a_stream_cannot_be(given: Any, text: str) -> None:
    with pytest.raises(untorch.InvalidArgumentError) as caught:
        untorch.stream(given)
    assert text in str(caught.value)


def test_settings_nest_and_none_is_not_the_null_stream() -> None:
    with untorch.stream(5):
        with untorch.stream(0):
            assert setting() == 0
            with untorch.stream(None):
                assert setting() is None
            assert setting() == 0
        assert setting() == 5
        with pytest.raises(KeyError), untorch.stream(6):
            raise KeyError
        assert setting() == 5
    assert setting() is None
    again = untorch.stream(3)
    for _ in range(2):
        with again:
            assert setting() == 3
    with again, pytest.raises(untorch.InvalidArgumentError, match="entered already"):
        again.__enter__()
    assert setting() is None


def test_settings_are_the_threads_own() -> None:
    seen: list[Any] = []
    with untorch.stream(5):
        thread = threading.Thread(target=lambda: seen.append(setting()))
        thread.start()
        thread.join()
        assert setting() == 5
    assert seen == [None]


@pytest.mark.slow
def test_the_object_is_kept_while_it_is_set() -> None:
    owner = Core(0x50)
    alive = weakref.ref(owner)
    scope = untorch.stream(owner)
    scope.__enter__()
    del owner
    gc.collect()
    assert alive() is not None
    scope.__exit__(None, None, None)
    del scope
    gc.collect()
    assert alive() is None


class FakeGpu:
    """A producer on a GPU that there is not: it writes down what it is asked, and hands out CPU memory as its own."""

    def __init__(self, device: tuple[int, int] = (2, 0), versions: bool = True) -> None:
        self.array, self.device, self.versions = np.arange(6, dtype=np.float32).reshape(2, 3), device, versions
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        if not self.versions and "max_version" in kwargs:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**({"max_version": kwargs["max_version"]} if "max_version" in kwargs else {}))


@pytest.mark.parametrize(("stream", "number"), [(0, 1), (1, 1), (2, 2), (0xABC0, 0xABC0), (2**63 + 8, 2**63 + 8)])
def test_the_producer_is_told_the_call_stream(stream: int, number: int) -> None:
    producer = FakeGpu()
    with untorch.stream(stream):
        pointer, dtype, *_ = _core.view_of(producer, 1, 0)
    assert producer.asked == [{"stream": number, "max_version": (1, 0)}]
    assert (pointer, dtype) == (producer.array.ctypes.data, "float32")


def test_a_producer_that_knows_no_version() -> None:
    producer = FakeGpu(versions=False)
    with untorch.stream(2):
        _core.view_of(producer, 1, 0)
    assert producer.asked == [{"stream": 2, "max_version": (1, 0)}, {"stream": 2}]


def test_managed_memory_is_the_gpus_and_pinned_memory_the_cpus() -> None:
    with untorch.stream(2):
        managed = FakeGpu((13, 0))
        _core.view_of(managed, 1, 0)
        pinned = FakeGpu((3, 0))
        _core.view_of(pinned, 1, 0)
    assert managed.asked[0]["stream"] == 2
    assert "stream" not in pinned.asked[0]


@pytest.mark.parametrize(
    ("place", "text"),
    [((0, -1), "the array is on cuda:1, the method runs on the CPU: pass a copy"),
     ((1, 0), "the array is on cuda:1, the method runs on cuda:0: pass a copy")],
)  # fmt: skip
def test_another_device_is_refused_before_the_producer_is_asked(place: tuple[int, int], text: str) -> None:
    producer = FakeGpu((2, 1))
    with pytest.raises(untorch.InvalidArgumentError, match=f"method 'view_of', argument 0: {text}"):
        _core.view_of(producer, *place)
    assert producer.asked == []


def test_a_device_that_is_no_pair() -> None:
    producer = FakeGpu()
    producer.device = 2  # type: ignore[assignment]
    with pytest.raises(TypeError, match="__dlpack_device__ of FakeGpu raised TypeError: expected a pair of integers"):
        _core.view_of(producer, 1, 0)


class Interface:
    """Only the CUDA array interface."""

    def __init__(self, **fields: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (2, 3), "typestr": "<f4", "data": (0, False), "strides": None, "stream": None,
        } | fields  # fmt: skip


def test_the_cuda_array_interface() -> None:
    # Without memory no driver is asked: what an array of no elements looks like.
    view = _core.view_of(Interface(shape=(0, 3), typestr="<c8"), 1, 0)
    assert view == (0, "complex64", 1, 0, (0, 3), (3, 1), False)
    view = _core.view_of(Interface(shape=(2, 0), strides=(16, 8), typestr="<i4", data=(0, True)), 1, 1)
    assert view == (0, "int32", 1, 1, (2, 0), (4, 2), True)
    with untorch.stream(2):  # the same stream: nothing has to wait
        assert _core.view_of(Interface(shape=(0,), stream=2), 1, 0)[4] == (0,)
    with untorch.stream(0):
        assert _core.view_of(Interface(shape=(0,), version=2), 1, 0)[4] == (0,)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mask": Interface()}, "masked arrays are not supported"),
        ({"typestr": "<V2"}, "the type <V2 is not supported"),
        ({"typestr": ">f4"}, "the type >f4 is not supported"),
        ({"typestr": None}, r"the type \(none\) is not supported"),
        ({"shape": [2, 3]}, "expected tuples of equal length as shape and strides"),
        ({"strides": (4,)}, "expected tuples of equal length as shape and strides"),
        ({"strides": (13, 4)}, "the strides are no multiples of the item size"),
        ({"shape": (2, -3)}, "shape and strides must be integers"),
        ({"shape": (2, "3")}, "shape and strides must be integers"),
        ({"shape": (2**40, 2**40)}, "the shape has more elements than memory can hold"),
        ({"data": 0}, r"expected \(address, read-only\) as data"),
        ({"data": ("0", False)}, r"expected \(address, read-only\) as data"),
        ({"stream": 0}, "stream: expected None, 1, 2 or an address"),
        ({"stream": -1}, "stream: expected None, 1, 2 or an address"),
    ],
)
def test_bad_cuda_array_interfaces(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match=f"argument 0: __cuda_array_interface__: {text}"):
        _core.view_of(Interface(**fields), 1, 0)


def test_the_cuda_array_interface_of_another_device() -> None:
    with pytest.raises(untorch.InvalidArgumentError, match="the array is on cuda:0, the method runs on the CPU"):
        _core.view_of(Interface(), 0, -1)


def test_a_stream_as_other_libraries_take_it() -> None:
    stream = untorch.CurrentStream(0xABC0)
    assert int(stream) == 0xABC0 and hex(stream) == "0xabc0"
    assert stream.__cuda_stream__() == (0, 0xABC0)
    assert repr(stream) == "<untorch.CurrentStream 0xabc0>"
    assert stream == untorch.CurrentStream(0xABC0) != untorch.CurrentStream(0)
    assert len({stream, untorch.CurrentStream(0xABC0)}) == 1
