"""Distinct values: sorted, consecutive, and distinct slices along a dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.kernels.arrays import Array, axis_of, empty_like, kernel, promoted

KERNELS: dict[str, Callable[..., Any]] = {}


def _summary(starts: Array, order: Array | None, inverse: bool, counts: bool, empty: Array) -> tuple[Array, Array]:
    """Inverse indices and counts from the marks of each group's first element, taken in ``order``."""
    none = empty_like(empty, numpy.int64)
    groups = numpy.cumsum(starts, dtype=numpy.int64) - 1
    if inverse and order is not None:
        scattered = numpy.empty_like(groups)
        scattered[order] = groups
        inverses = scattered
    else:
        inverses = groups if inverse else none
    edges = numpy.append(numpy.flatnonzero(starts), starts.size)
    return inverses, numpy.diff(edges).astype(numpy.int64) if counts else none


def _starts(values: Array) -> Array:
    """True where an element differs from the one before; NaN differs from everything, itself included."""
    starts = numpy.ones(values.shape[0], numpy.bool_)
    if values.ndim > 1:
        starts[1:] = (values[1:] != values[:-1]).any(axis=tuple(range(1, values.ndim)))
    else:
        starts[1:] = values[1:] != values[:-1]
    return starts


@kernel(KERNELS, "_unique2")
def unique2(
    self: Array,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Array, Array, Array]:
    """The values come sorted in either case; PyTorch leaves the order open when ``sorted`` is false."""
    del sorted
    flat = self.reshape(-1)
    order = numpy.argsort(promoted(flat), kind="stable")
    values = flat[order]
    starts = _starts(values)
    inverse, counts = _summary(starts, order, return_inverse, return_counts, self)
    return values[starts], inverse.reshape(self.shape) if return_inverse else inverse, counts


@kernel(KERNELS, "_unique")
def unique(
    self: Array,
    sorted: bool = True,
    return_inverse: bool = False,
) -> tuple[Array, Array]:
    return unique2(self, sorted, return_inverse)[:2]


@kernel(KERNELS, "unique_consecutive")
def unique_consecutive(
    self: Array,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Array, Array, Array]:
    if dim is not None and (dim != 0 or self.ndim != 1):
        return unique_dim_consecutive(self, dim)
    flat = self.reshape(-1)
    starts = _starts(flat)
    inverse, counts = _summary(starts, None, return_inverse, return_counts, self)
    return flat[starts], inverse.reshape(self.shape) if return_inverse else inverse, counts


@kernel(KERNELS, "unique_dim_consecutive")
def unique_dim_consecutive(
    self: Array,
    dim: int,
    return_inverse: bool = True,
    return_counts: bool = True,
) -> tuple[Array, Array, Array]:
    axis = axis_of("unique_dim_consecutive", dim, self.ndim)
    slices = numpy.moveaxis(self, axis, 0)
    starts = _starts(slices)
    del return_inverse, return_counts  # PyTorch gives both in any case
    inverse, counts = _summary(starts, None, True, True, self)
    return _gathered(slices[starts], axis), inverse, counts


@kernel(KERNELS, "unique_dim")
def unique_dim(
    self: Array,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Array, Array, Array]:
    """Distinct slices in lexicographic order."""
    del sorted, return_inverse, return_counts  # sorted, and with both, in any case, as in PyTorch
    axis = axis_of("unique_dim", dim, self.ndim)
    slices = numpy.moveaxis(self, axis, 0)
    rows = promoted(slices.reshape(slices.shape[0], slices.size // max(slices.shape[0], 1)))
    # lexsort takes the most significant key last
    order = numpy.lexsort(rows.T[::-1]) if rows.shape[1] else numpy.arange(rows.shape[0])
    ordered = slices[order]
    starts = _starts(ordered)
    inverse, counts = _summary(starts, order, True, True, self)
    return _gathered(ordered[starts], axis), inverse, counts


def _gathered(slices: Array, axis: int) -> Array:
    """The slices in front, stored by rows, seen with their dimension where it belongs: PyTorch's layout."""
    return numpy.moveaxis(numpy.ascontiguousarray(slices), 0, axis)
