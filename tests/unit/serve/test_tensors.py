"""Tensors of the protocol as arrays, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.serve.inference.tensors import (
    DATATYPES,
    check_shape,
    datatype_of,
    dtype_of,
    from_json,
    from_raw,
    to_json,
    to_raw,
)


@pytest.mark.parametrize("datatype", DATATYPES)
@given(count=st.integers(0, 5), offset=st.integers(0, 9))
def test_raw_and_json_round_trips(datatype: str, count: int, offset: int) -> None:
    """The bytes may lie at any address."""
    array = (np.arange(2 * count) % 2).reshape(2, count).astype(dtype_of(datatype, "x"))
    assert datatype_of(array.dtype.name) == datatype
    raw = to_raw(array)
    got = from_raw(memoryview(b"x" * offset + raw)[offset:], datatype, (2, count), "x")
    assert (got.dtype, got.tolist(), got.flags.aligned) == (array.dtype, array.tolist(), True)
    again = from_json(to_json(array), datatype, (2, count), "x")
    assert (again.dtype, again.tolist()) == (array.dtype, array.tolist())


def test_bfloat16_values() -> None:
    array = from_json([1.0, 3.14159, -65536], "BF16", (3,), "x")
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype(float).tolist() == [1.0, 3.140625, -65536.0]
    assert from_raw(b"\x80\x3f", "BF16", (1,), "x").astype(float).tolist() == [1.0]


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_bytes_round_trip(items: list[bytes]) -> None:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    assert from_raw(to_raw(array), "BYTES", (len(items),), "x").tolist() == items


def test_any_byte_is_a_bool() -> None:
    array = from_raw(b"\x00\x02\xff", "BOOL", (3,), "x")
    assert array.view(np.uint8).tolist() == [0, 1, 1]


def test_strings() -> None:
    assert from_json(["ä", ""], "BYTES", (2,), "x").tolist() == ["ä".encode(), b""]
    text = np.empty(2, dtype=object)
    text[:] = ["ä", b"\xff"]
    assert to_json(text) == ["ä", "�"]
    assert to_raw(text) == b"\x02\x00\x00\x00\xc3\xa4\x01\x00\x00\x00\xff"


_NESTED = "x: data: expected one list of 4 elements, or lists in lists with the sizes [1, 4], got other sizes"


def test_nested_lists() -> None:
    for shape in ((2, 3), (2, 0), (0, 3), (2, 1, 3), ()):
        array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        values = array.tolist() if shape else [float(array)]
        np.testing.assert_array_equal(from_json(values, "FP32", shape, "x"), array)


@pytest.mark.parametrize(
    ("values", "datatype", "shape", "text"),
    [
        ([1, 2], "FP32", (3,), "x: data: expected 3 elements as the shape says, got 2"),
        ([[1], 2], "FP32", (2,), "x: data: expected lists of equal depth"),
        ([1, [2]], "FP32", (2,), "x: data: expected numbers for FP32, got a list"),
        ([[1, 2], [3, 4]], "FP32", (1, 4), _NESTED),
        ([[1, 2, 3], [4]], "FP32", (1, 4), _NESTED),
        ([[[1, 2, 3, 4]]], "FP32", (1, 4), _NESTED),
        ({"a": 1}, "FP32", (1,), "x: data: expected a list, got an object"),
        (None, "FP32", (1,), "x: data: expected a list, got null"),
        ([None], "FP32", (1,), "x: data: expected numbers for FP32, got null"),
        ([True], "INT8", (1,), "x: data: expected integers for INT8, got true or false"),
        ([1.5], "INT8", (1,), "x: data: expected integers for INT8, got a number with a fraction"),
        ([300], "INT8", (1,), "x: data: a number is out of the range of INT8"),
        ([10**400], "FP64", (1,), "x: data: a number is out of the range of FP64"),
        ([1], "BOOL", (1,), "x: data: expected true and false for BOOL, got an integer"),
        ([1], "BYTES", (1,), "x: data: expected strings for BYTES, got an integer"),
    ],
)
def test_wrong_json(values: Any, datatype: str, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        from_json(values, datatype, shape, "x")
    assert str(caught.value) == text


@pytest.mark.parametrize("data", [b"\x01\x00\x00\x00", b"\x09\x00\x00\x00a", b"\x00", b"\x00\x00\x00\x00" * 3])
def test_damaged_bytes(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="x: expected 2 elements of BYTES, each behind its length"):
        from_raw(data, "BYTES", (2,), "x")


def test_other_errors() -> None:
    with pytest.raises(InvalidArgumentError, match=r"x: expected 8 bytes for FP32\[2\], got 7"):
        from_raw(b"1234567", "FP32", (2,), "x")
    with pytest.raises(UnsupportedError, match="dtype complex64: the Open Inference Protocol has no datatype for it"):
        datatype_of("complex64")
    for shape in (None, "12", [1.0], [-1], [True]):
        with pytest.raises(InvalidArgumentError, match="x: shape: expected a list of sizes"):
            check_shape(shape, "x")
    with pytest.raises(InvalidArgumentError, match="x: shape: expected at most 64 dimensions, got 65"):
        check_shape([1] * 65, "x")
    with pytest.raises(InvalidArgumentError, match="fewer than"):
        check_shape([0, 1 << 61, 2], "x")  # numpy counts them without the zero
