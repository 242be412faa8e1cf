"""``untorch.zeros`` and ``untorch.empty``: arrays in the library's memory, on the CPU or a GPU."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import Any

from untorch import _core
from untorch._core import Tensor
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["empty", "zeros"]

_DEVICE = re.compile(r"cpu|cuda(?::(\d{1,4}))?")
_MOST_DIMS = 64


def zeros(shape: int | Sequence[int], dtype: Any, device: str = "cpu") -> Tensor:
    """A row-major array of zeros in the library's memory.

    Its memory begins at a multiple of 64 bytes on the CPU and of 256 bytes on a GPU: what inputs that a model writes
    into need. On a GPU zeros are written in the order of the call's stream. On the CPU large arrays take memory when
    they are written to.

    Args:
        shape: The sizes, or one of them.
        dtype: A name ("float32", "bfloat16", "float8_e4m3fn" …), or what ``numpy.dtype`` takes (``np.float32``,
            ``ml_dtypes.bfloat16``).
        device: "cpu", "cuda" (the current GPU) or "cuda:1".

    Raises:
        ArgumentTypeError: An argument has a wrong type. Also a TypeError.
        InvalidArgumentError: An argument has a wrong value. Also a ValueError.
        OutOfMemoryError: There is not enough memory. Also a MemoryError.
        UnsupportedError: There is no GPU, or no driver.
    """
    return _create("zeros", shape, dtype, device)


def empty(shape: int | Sequence[int], dtype: Any, device: str = "cpu") -> Tensor:
    """Likewise, uninitialised: it holds what was in that memory before."""
    return _create("empty", shape, dtype, device)


def _create(function: str, shape: Any, dtype: Any, device: Any) -> Tensor:
    sizes, name = _sizes(function, shape), _dtype(function, dtype)
    if not isinstance(device, str):
        raise ArgumentTypeError(
            f"{function}: device: expected 'cpu', 'cuda' or 'cuda:N', got {type(device).__name__}"
        )  # fmt: skip
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise InvalidArgumentError(f"{function}: device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    index = None if device == "cpu" else int(match[1] or -1)
    return _core.create(name, sizes, index, function == "zeros")


def _sizes(function: str, shape: Any) -> list[int]:
    text = f"{function}: shape: expected an integer or a sequence of integers, got {shape!r}"
    try:
        sizes = [operator.index(shape)]
    except TypeError:
        try:
            sizes = [operator.index(size) for size in shape]
        except TypeError:
            raise ArgumentTypeError(text) from None
    if any(not 0 <= size < 1 << 63 for size in sizes):
        raise InvalidArgumentError(f"{function}: shape: expected sizes from 0 to 2**63 - 1, got {shape!r}")
    if len(sizes) > _MOST_DIMS:
        raise InvalidArgumentError(f"{function}: shape: expected at most {_MOST_DIMS} dimensions, got {len(sizes)}")
    if math.prod(sizes) >= 1 << 63:
        raise InvalidArgumentError(f"{function}: shape: expected fewer than 2**63 elements, got {shape!r}")
    return sizes


def _dtype(function: str, given: Any) -> str:
    known = _core.dtypes()
    name: Any = given
    if not isinstance(given, str):
        import numpy  # not at the top: importing untorch stays quick

        try:
            name = numpy.dtype(given).name if given is not None else None
        except TypeError:
            name = None
    if name not in known:
        shown = given if isinstance(given, str) else getattr(given, "__name__", given)
        kind = InvalidArgumentError if isinstance(given, str) or name is not None else ArgumentTypeError
        raise kind(f"{function}: dtype: expected one of {', '.join(known)}, got {shown!r}")
    return str(name)
