"""Tries whether a method's rows are independent: two rows together, then each alone, on made-up inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from untorch.runtime.errors import UntorchError
from untorch.runtime.log import INFO, log
from untorch.runtime.spec import SymbolicDim, TensorSpec
from untorch.serve.inference.tensors import DATATYPES, datatype_of, dtype_of

__all__ = ["relates_rows"]

Array = NDArray[Any]

_SIZE = 8  # of other dynamic dimensions: small, and no special case
# Rounding differs with the batch size, also by an index that is chosen. What mixes rows differs by more.
_TOLERANCE, _MOST_DIFFERENT = 0.05, 0.1
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
    "%": lambda a, b: a % b, "min": min, "max": max,
}  # fmt: skip


def relates_rows(run: Callable[[Sequence[Array]], list[Any]], specs: Sequence[TensorSpec], indices: int = 1) -> bool:
    """Whether two rows give other results together than alone. False also where that cannot be tried.

    Args:
        run: The method.
        specs: Its inputs, whose dimension 0 is the batch.
        indices: The largest integer in inputs of integers: they may be indices.
    """
    rng = numpy.random.default_rng(0)
    try:
        sizes = {
            size.name: _clipped(size)
            for spec in specs
            for size in spec.shape
            if isinstance(size, SymbolicDim) and not size.is_expression
        }
        rows = [_made_up(spec, sizes, rng, indices) for spec in specs]
        together = run(rows)
        alone = [run([array[i : i + 1].copy() for array in rows]) for i in range(2)]
    except (UntorchError, ValueError, LookupError, ArithmeticError) as error:
        log(INFO, "whether rows are independent was not tried: %s", error)
        return False
    for joined, *parts in zip(together, *alone, strict=True):
        if joined is not None and _differ(joined, numpy.concatenate([numpy.asarray(part) for part in parts])):
            return True
    return False


def _made_up(spec: TensorSpec, sizes: Mapping[str, int], rng: numpy.random.Generator, indices: int) -> Array:
    """Two rows. Raises UntorchError or ValueError where there can be none."""
    shape = (2, *(_size(size, sizes) for size in spec.shape[1:]))
    dtype = dtype_of(datatype_of(spec.dtype), spec.name)
    if spec.dtype in DATATYPES.values() and dtype.kind not in "biu":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 1 if dtype.kind != "b" and not indices else 2, shape).astype(dtype)


def _size(size: int | SymbolicDim, sizes: Mapping[str, int]) -> int:
    if not isinstance(size, SymbolicDim):
        return size
    if not size.is_expression:
        return sizes[size.name]
    if size.rpn is None:
        raise ValueError(f"the size {size} is not known")
    stack: list[int] = []
    for word in size.rpn:
        if word in _OPERATORS:
            right, left = stack.pop(), stack.pop()
            stack.append(_OPERATORS[str(word)](left, right))
        else:
            stack.append(sizes[word] if isinstance(word, str) else word)
    return stack.pop()


def _clipped(size: SymbolicDim) -> int:
    return max(size.min, _SIZE if size.max is None else min(_SIZE, size.max))


def _differ(joined: Any, alone: Array) -> bool:
    joined = numpy.asarray(joined)
    if joined.shape != alone.shape:
        return True
    if joined.size == 0:
        return False
    if joined.dtype.kind in "biu":
        return bool((joined != alone).mean() > _MOST_DIFFERENT)
    kind = numpy.complex128 if joined.dtype.kind == "c" else numpy.float64
    joined, alone = joined.astype(kind), alone.astype(kind)
    finite = numpy.abs(alone[numpy.isfinite(alone)])
    scale = finite.max() if finite.size else 1.0
    same = numpy.isclose(joined, alone, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)
    return bool((~same).mean() > 0)
