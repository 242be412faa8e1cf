"""Tensors of the protocol as arrays: datatypes, raw bytes in row-major order, JSON's numbers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "DATATYPES", "check_shape", "datatype_of", "dtype_name", "dtype_of", "from_json", "from_raw", "to_json", "to_raw",
]  # fmt: skip

Array = NDArray[Any]

# The protocol's name and ours, which is numpy's or, of bfloat16, that of ml_dtypes.
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "BF16": "bfloat16", "FP32": "float32",
    "FP64": "float64",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in DATATYPES.items()}
# Numpy's own.
_DTYPES: dict[str, numpy.dtype[Any]] = {
    "BYTES": numpy.dtype(object), **{name: numpy.dtype(ours) for name, ours in DATATYPES.items() if name != "BF16"}
}  # fmt: skip
_MOST_DIMS = 64


@functools.cache
def dtype_name(dtype: numpy.dtype[Any]) -> str:
    """Our name of a dtype. Numpy makes it anew at each call."""
    return dtype.name


def datatype_of(dtype: str) -> str:
    """The protocol's datatype for one of ours; text (an array of objects) is BYTES. Raises UnsupportedError."""
    if dtype in ("object", "str", "bytes"):
        return "BYTES"
    if dtype not in _NAMES:
        raise UnsupportedError(f"dtype {dtype}: the Open Inference Protocol has no datatype for it")
    return _NAMES[dtype]


def dtype_of(datatype: str, what: str) -> numpy.dtype[Any]:
    """Numpy's dtype of a datatype. Raises InvalidArgumentError; UnsupportedError where ml_dtypes is missing."""
    dtype = _DTYPES.get(datatype)
    if dtype is not None:
        return dtype
    if datatype != "BF16":
        known = ", ".join((*DATATYPES, "BYTES"))
        raise InvalidArgumentError(f"{what}: datatype: expected one of {known}, got {datatype!r:.40}")
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(f"{what}: datatype BF16 needs the package ml_dtypes: pip install ml_dtypes") from None
    bfloat16: numpy.dtype[Any] = numpy.dtype(ml_dtypes.bfloat16)
    return bfloat16


def check_shape(shape: Any, what: str) -> tuple[int, ...]:
    """The sizes of a tensor. Raises InvalidArgumentError."""
    if not isinstance(shape, list | tuple):
        raise _not_sizes(shape, what)
    if len(shape) > _MOST_DIMS:
        raise InvalidArgumentError(f"{what}: shape: expected at most {_MOST_DIMS} dimensions, got {len(shape)}")
    count = 1
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 62:
            raise _not_sizes(shape, what)
        count *= size or 1
    if count >= 1 << 62:
        raise InvalidArgumentError(f"{what}: shape: expected fewer than 2**62 elements, got {list(shape)}")
    return tuple(shape)


def _not_sizes(shape: Any, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what}: shape: expected a list of sizes, got {shape!r:.80}")


def from_raw(data: bytes | memoryview, datatype: str, shape: tuple[int, ...], what: str) -> Array:
    """The array whose elements lie in ``data``, little-endian and row-major. Borrows the memory where it can."""
    if datatype == "BYTES":
        return _read_bytes(memoryview(data), shape, what)
    dtype = dtype_of(datatype, what)
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InvalidArgumentError(
            f"{what}: expected {expected} bytes for {datatype}{list(shape)}, got {len(data)}"
        )  # fmt: skip
    is_bool = dtype.kind == "b"
    array: Array = numpy.frombuffer(data, dtype=numpy.uint8 if is_bool else dtype).reshape(shape)
    if is_bool:
        return array.astype(bool)  # any other byte than 0 and 1 would be an invalid bool
    return array if array.flags.aligned else array.copy()


def to_raw(array: Array) -> bytes:
    """What ``from_raw`` reads."""
    if array.dtype == object:
        parts = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1)]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return array.tobytes()


def _read_bytes(data: memoryview, shape: tuple[int, ...], what: str) -> Array:
    """Elements of any length, each behind its length in four bytes."""
    items: list[bytes] = []
    count, position = math.prod(shape), 0
    while position < len(data):
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if position + 4 > len(data) or end > len(data) or len(items) == count:
            break
        items.append(bytes(data[position + 4 : end]))
        position = end
    if position != len(data) or len(items) != count:
        raise InvalidArgumentError(
            f"{what}: expected {count} elements of BYTES, each behind its length in 4 bytes, got {len(data)} bytes "
            f"that hold {len(items)} and {len(data) - position} bytes more"
        )
    array = numpy.empty(count, dtype=object)
    array[:] = items
    return array.reshape(shape)


def from_json(values: Any, datatype: str, shape: tuple[int, ...], what: str) -> Array:
    """The array of a JSON list, flat or nested. Raises InvalidArgumentError."""
    dtype = dtype_of(datatype, what)
    if not isinstance(values, list):
        raise InvalidArgumentError(f"{what}: data: expected a list, got {_kind(values)}")
    flat = _flatten(values, shape, what)
    if datatype == "BYTES":
        array = numpy.empty(len(flat), dtype=object)
        for i, item in enumerate(flat):
            if not isinstance(item, str):
                raise InvalidArgumentError(f"{what}: data: expected strings for BYTES, got {_kind(item)}")
            array[i] = item.encode("utf-8", "surrogatepass")
        return array.reshape(shape)
    wanted: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int,) if dtype.kind in "iu" else (int, float)
    for item in flat:
        if not isinstance(item, wanted) or (isinstance(item, bool) and datatype != "BOOL"):
            kinds = {"BOOL": "true and false"}.get(datatype, "integers" if dtype.kind in "iu" else "numbers")
            raise InvalidArgumentError(f"{what}: data: expected {kinds} for {datatype}, got {_kind(item)}")
    try:
        if dtype.name == "bfloat16":
            return numpy.array(flat, dtype=numpy.float32).astype(dtype).reshape(shape)
        with numpy.errstate(over="ignore"):
            return numpy.array(flat, dtype=dtype).reshape(shape)
    except OverflowError:
        raise InvalidArgumentError(f"{what}: data: a number is out of the range of {datatype}") from None


def to_json(array: Array) -> list[Any]:
    """Row-major, flat."""
    if array.dtype == object:
        return [_text(item) for item in array.reshape(-1)]
    if dtype_name(array.dtype) in ("bfloat16", "float16"):
        array = array.astype(numpy.float32)
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _text(item: Any) -> str:
    return item if isinstance(item, str) else bytes(item).decode(errors="replace")


def _flatten(values: list[Any], shape: tuple[int, ...], what: str) -> list[Any]:
    """The elements of a list that is flat, or that is nested as the shape says."""
    flat, sizes = values, [len(values)]
    while flat and isinstance(flat[0], list):
        if not all(isinstance(item, list) for item in flat):
            raise InvalidArgumentError(f"{what}: data: expected lists of equal depth")
        sizes.append(len(flat[0]))
        if sizes != list(shape[: len(sizes)]) or any(len(part) != sizes[-1] for part in flat):
            raise InvalidArgumentError(
                f"{what}: data: expected one list of {math.prod(shape)} elements, or lists in lists with the sizes "
                f"{list(shape)}, got other sizes"
            )
        flat = [item for part in flat for item in part]
    if len(flat) != math.prod(shape):
        raise InvalidArgumentError(
            f"{what}: data: expected {math.prod(shape)} elements as the shape says, got {len(flat)}"
        )  # fmt: skip
    return flat


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "an integer"}
    return "null" if value is None else names.get(type(value), "a number with a fraction")
