"""What the kernels share: dtypes to compute in, memory layouts, axes, and the dictionary that they are put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy

from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

Array: TypeAlias = numpy.ndarray[Any, numpy.dtype[Any]]

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def kernel(kernels: dict[str, Callable[..., Any]], *names: str) -> Callable[[_FunctionT], _FunctionT]:
    """Decorator: puts a function into a module's KERNELS under the names of the aten operators that it computes.

    What is put there runs without numpy's warnings: as in PyTorch, overflow and division by zero are results.
    """

    def decorate(function: _FunctionT) -> _FunctionT:
        for name in names:
            kernels[name] = numpy.errstate(all="ignore")(function)
        return function

    return decorate


def compute_dtype(dtype: numpy.dtype[Any]) -> numpy.dtype[Any]:
    """The dtype to calculate in: float32 for half types (bfloat16 is a dtype of ml_dtypes), else the dtype itself."""
    if dtype.name in ("float16", "bfloat16"):
        return numpy.dtype(numpy.float32)
    return dtype


def promoted(array: Array) -> Array:
    """``array`` in its compute dtype; no copy when that is its own."""
    return array.astype(compute_dtype(array.dtype), copy=False)


def column_major(array: Array) -> Array:
    """A copy whose last two axes are stored by columns, as LAPACK and the compiled model expect them."""
    if array.ndim < 2:
        return numpy.array(array, order="C")
    columns: Array = numpy.array(array.swapaxes(-1, -2), order="C")
    return numpy.swapaxes(columns, -1, -2)


def row_major(array: Array) -> Array:
    return numpy.array(array, order="C")


def empty_like(array: Array, dtype: Any = None) -> Array:
    """The empty tensor that stands for a result that was not asked for."""
    return numpy.empty((0,), array.dtype if dtype is None else dtype)


def axis_of(operator: str, dim: int, ndim: int) -> int:
    """``dim`` counted from the front; a tensor without axes accepts 0 and -1."""
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise InvalidArgumentError(
            f"{operator}: argument `dim`: expected a value from {-bound} to {bound - 1} for a tensor of {ndim} "
            f"dimensions, got {dim}"
        )
    return dim % bound


def check_square(operator: str, name: str, array: Array) -> None:
    if array.ndim < 2 or array.shape[-1] != array.shape[-2]:
        raise InvalidArgumentError(
            f"{operator}: argument `{name}`: expected a batch of square matrices, got the shape {array.shape}"
        )


def check_matrix(operator: str, name: str, array: Array) -> None:
    if array.ndim < 2:
        raise InvalidArgumentError(
            f"{operator}: argument `{name}`: expected at least 2 dimensions, got the shape {array.shape}"
        )


def check_inexact(operator: str, name: str, array: Array) -> None:
    """LAPACK works on float32, float64, complex64 and complex128 only, as in PyTorch."""
    if array.dtype.char not in "fdFD":
        raise UnsupportedError(
            f"{operator}: argument `{name}`: expected float32, float64, complex64 or complex128, got "
            f"{array.dtype.name}; convert it in the model"
        )
