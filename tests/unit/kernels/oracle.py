"""Runs a Python kernel and PyTorch's own operator on the same input and compares results, dtypes and memory layout."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy
import torch

from untorch.runtime.registry import find_kernel

TOLERANCES = {
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float32": 2e-4,
    "complex64": 2e-4,
    "float64": 1e-9,
    "complex128": 1e-9,
}


def to_numpy(value: Any) -> Any:
    """A numpy view of a tensor, with its strides; everything else as it is, lists item by item."""
    if isinstance(value, (list, tuple)):
        return [to_numpy(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def to_torch(value: numpy.ndarray) -> torch.Tensor:
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(numpy.array(value.astype(numpy.float32))).to(torch.bfloat16)
    return torch.from_numpy(numpy.array(value))


def operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def run_both(name: str, *args: Any, **kwargs: Any) -> tuple[list[numpy.ndarray], list[torch.Tensor]]:
    """Results of the kernel and of PyTorch, after a check of their number, dtypes, shapes and strides."""
    expected = as_list(operator(name)(*args, **kwargs))
    numpy_kwargs = {key: to_numpy(value) for key, value in kwargs.items()}
    actual = as_list(find_kernel(f"aten::{name}")(*[to_numpy(a) for a in args], **numpy_kwargs))
    check_form(actual, expected)
    return actual, expected


def check_form(actual: Sequence[Any], expected: Sequence[Any], strides: bool = True) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert isinstance(ours, (numpy.ndarray, numpy.generic))
        assert ours.dtype.name == str(theirs.dtype).removeprefix("torch.")
        assert ours.shape == tuple(theirs.shape)
        if strides and ours.size > 0:
            ours_strides = [s // ours.itemsize for s, n in zip(ours.strides, ours.shape, strict=True) if n > 1]
            theirs_strides = [s for s, n in zip(theirs.stride(), theirs.shape, strict=True) if n > 1]
            assert ours_strides == theirs_strides


def check_close(actual: Any, expected: torch.Tensor, factor: float = 1.0) -> None:
    tolerance = TOLERANCES.get(str(expected.dtype).removeprefix("torch."), 0) * factor
    torch.testing.assert_close(
        to_torch(numpy.asarray(actual)), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check(name: str, *args: Any, factor: float = 1.0, **kwargs: Any) -> None:
    """Kernel and operator agree in everything, values included."""
    for ours, theirs in zip(*run_both(name, *args, **kwargs), strict=True):
        check_close(ours, theirs, factor)
