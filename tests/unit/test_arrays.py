"""untorch.zeros and untorch.empty on the CPU: what they give, and their errors. GPUs: tests/native/cuda, tests/gpu."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import untorch
from untorch import _core


@pytest.mark.parametrize("make", [untorch.zeros, untorch.empty])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (1 << 19, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex64", "uint8"])
def test_an_array(make: Any, shape: tuple[int, ...], dtype: str) -> None:
    made = make(shape, dtype)
    array = made.numpy()
    assert (made.shape, made.dtype, made.device) == (shape, dtype, "cpu")
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype)) and array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0 or array.size == 0
    if make is untorch.zeros:
        assert not array.any()


@pytest.mark.slow
def test_it_is_shared_and_writable() -> None:
    made = untorch.zeros((2, 3), np.float32)
    array = made.numpy()
    array[1, 2] = 7
    assert np.from_dlpack(made)[1, 2] == 7 and np.asarray(made)[1, 2] == 7
    assert made.__dlpack_device__() == (1, 0)
    del made
    gc.collect()
    assert array[1, 2] == 7  # the array keeps the memory


def test_it_says_what_it_is() -> None:
    made = untorch.zeros((2, 3), np.float32)
    assert repr(made) == "<untorch.Tensor float32[2, 3] on cpu>"
    assert made._repr_html_() == "<code>untorch.Tensor</code> float32[2, 3] on cpu"
    assert repr(untorch.zeros((), "int64")) == "<untorch.Tensor int64[] on cpu>"


def test_what_is_freed_may_come_back_but_zeros_are_zeros() -> None:
    for size in (10, 1 << 16, 1 << 22):
        for _ in range(3):
            made = untorch.zeros(size, "float32")
            assert not made.numpy().any()
            made.numpy()[:] = 1


def test_large_zeros_take_memory_when_they_are_written_to() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    made = untorch.zeros((1 << 28,), "uint8")
    assert resident() - before < 1 << 26
    array = made.numpy()
    array[1 << 27] = 1
    assert array[1 << 27] == 1 and resident() - before < 1 << 26


def test_dtypes() -> None:
    for name in _core.dtypes():
        assert untorch.zeros(3, name).dtype == name
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.float8_e4m3fn):
        assert untorch.zeros(3, dtype).dtype == np.dtype(dtype).name
    assert untorch.zeros((np.int64(2), 3), int).dtype == "int64"


@pytest.mark.slow
def test_memory_goes_back() -> None:
    gc.collect()
    before = _core.live_tensors()
    made = untorch.zeros((1 << 21,), "float32")
    assert _core.live_tensors() == before + 1
    del made
    gc.collect()
    assert _core.live_tensors() == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("ab", "float32"), untorch.ArgumentTypeError, "shape: expected an integer or a sequence of integers, got 'ab'"),
        (((2, 1.5), "float32"), untorch.ArgumentTypeError, "shape: expected an integer or a sequence of integers, got "
                                                           "(2, 1.5)"),
        (((2, -1), "float32"), untorch.InvalidArgumentError, "shape: expected sizes from 0 to 2**63 - 1, got (2, -1)"),
        (((1,) * 65, "int8"), untorch.InvalidArgumentError, "shape: expected at most 64 dimensions, got 65"),
        (((1 << 40, 1 << 40), "int8"), untorch.InvalidArgumentError, "shape: expected fewer than 2**63 elements, got "
                                                                     "(1099511627776, 1099511627776)"),
        ((2, "float"), untorch.InvalidArgumentError, "dtype: expected one of uint8, int8, "),
        ((2, object), untorch.InvalidArgumentError, "dtype: expected one of uint8, int8, "),
        ((2, None), untorch.ArgumentTypeError, "dtype: expected one of uint8, int8, "),
        ((2, "int8", "tpu"), untorch.InvalidArgumentError, "device: expected 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ((2, "int8", "cuda:x"), untorch.InvalidArgumentError, "device: expected 'cpu', 'cuda' or 'cuda:N', got "
                                                              "'cuda:x'"),
        ((2, "int8", 0), untorch.ArgumentTypeError, "device: expected 'cpu', 'cuda' or 'cuda:N', got int"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [untorch.zeros, untorch.empty])
def test_errors(make: Any, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make(*arguments)
    assert str(caught.value).startswith(f"{make.__name__}: {text}")


def test_too_much() -> None:
    with pytest.raises(untorch.OutOfMemoryError, match="out of memory: could not allocate 4611686018427387904 bytes"):
        untorch.zeros((1 << 62,), "int8")
