"""Order statistics, histograms and counts: median, mode, k-th value, histogram, bincount."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, axis_of, compute_dtype, kernel, promoted

KERNELS: dict[str, Callable[..., Any]] = {}


def _isnan(array: Array) -> Array:
    """NaN marks; integers have none."""
    return numpy.asarray(array != array)


def _lines(operator: str, self: Array, dim: int) -> tuple[Array, int]:
    """The values along ``dim`` as the last axis, and the axis; a tensor without axes is a line of one value."""
    axis = axis_of(operator, dim, self.ndim)
    lines = numpy.moveaxis(self, axis, -1) if self.ndim else self.reshape(1)
    if lines.shape[-1] == 0:
        raise InvalidArgumentError(f"{operator}: dimension {dim} of the shape {self.shape} has no elements")
    return lines, axis


def _pick(self: Array, lines: Array, indices: Array, axis: int, keepdim: bool) -> tuple[Array, Array]:
    """Values and indices, both stored by rows, of one position for each line."""
    values = numpy.take_along_axis(lines, indices[..., None], axis=-1)[..., 0]
    if keepdim and self.ndim:
        values, indices = numpy.expand_dims(values, axis), numpy.expand_dims(indices, axis)
    return numpy.array(values, order="C"), numpy.array(indices, numpy.int64, order="C")


def _order(lines: Array) -> Array:
    return numpy.argsort(promoted(lines), axis=-1, kind="stable")  # NaN comes last, as in PyTorch


@kernel(KERNELS, "median.dim")
def median_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower of the two middle values; a line that holds NaN gives its first NaN."""
    lines, axis = _lines("median", self, dim)
    nan = _isnan(lines)
    indices = _order(lines)[..., (lines.shape[-1] - 1) // 2]
    indices = numpy.where(nan.any(axis=-1), nan.argmax(axis=-1), indices)
    return _pick(self, lines, indices, axis, keepdim)


@kernel(KERNELS, "nanmedian.dim")
def nanmedian_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """As ``median.dim`` among the values that are not NaN; NaN where there are none."""
    lines, axis = _lines("nanmedian", self, dim)
    count = numpy.maximum((~_isnan(lines)).sum(axis=-1), 1)
    indices = numpy.take_along_axis(_order(lines), ((count - 1) // 2)[..., None], axis=-1)[..., 0]
    return _pick(self, lines, indices, axis, keepdim)


@kernel(KERNELS, "median")
def median(self: Array) -> Array:
    return _median_of_all("median", self, median_dim)


@kernel(KERNELS, "nanmedian")
def nanmedian(self: Array) -> Array:
    return _median_of_all("nanmedian", self, nanmedian_dim)


def _median_of_all(operator: str, self: Array, along: Callable[..., tuple[Array, Array]]) -> Array:
    if self.size == 0:
        if self.dtype.kind in "iub":
            raise InvalidArgumentError(f"{operator}: argument `self`: expected elements, got the shape {self.shape}")
        return numpy.array(math.nan, self.dtype)
    return along(self.reshape(-1), 0)[0]


@kernel(KERNELS, "kthvalue")
def kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    lines, axis = _lines("kthvalue", self, dim)
    if not 1 <= k <= lines.shape[-1]:
        raise InvalidArgumentError(f"kthvalue: argument `k`: expected 1 to {lines.shape[-1]}, got {k}")
    return _pick(self, lines, _order(lines)[..., k - 1], axis, keepdim)


@kernel(KERNELS, "mode")
def mode(self: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The most frequent value, the smallest of them when several are, and its last position."""
    lines, axis = _lines("mode", self, dim)
    order = _order(lines)
    ordered = numpy.take_along_axis(lines, order, axis=-1)
    position = numpy.arange(lines.shape[-1])
    starts = numpy.ones(ordered.shape, numpy.bool_)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    start = numpy.maximum.accumulate(numpy.where(starts, position, 0), axis=-1)
    best = (position - start).argmax(axis=-1)  # the first of the longest runs ends at the smallest value
    indices = numpy.take_along_axis(order, best[..., None], axis=-1)[..., 0]
    return _pick(self, lines, indices, axis, keepdim)


def _outer_edges(operator: str, values: Array, limits: tuple[float, float] | None) -> tuple[float, float]:
    """The ends of a histogram: what is asked for, else those of the data; widened when they coincide."""
    if limits is not None:
        low, high = limits
    elif values.size:
        low, high = float(values.min()), float(values.max())
    else:
        low, high = 0.0, 0.0
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise InvalidArgumentError(f"{operator}: expected finite bounds in order, got [{low}, {high}]")
    return (low - 0.5, high + 0.5) if low == high else (low, high)


@kernel(KERNELS, "histc")
def histc(self: Array, bins: int = 100, min: float = 0, max: float = 0) -> Array:
    if bins < 1:
        raise InvalidArgumentError(f"histc: argument `bins`: expected at least 1, got {bins}")
    values = promoted(self).reshape(-1)
    low, high = _outer_edges("histc", values, None if min == max else (min, max))
    if high - low == 1.0 and (min == max) and (values.size == 0 or values.min() == values.max()):
        low, high = low - 0.5, high + 0.5  # this operator widens by one on each side
    inside = values[(values >= low) & (values <= high)]
    dtype = values.dtype if values.dtype.kind == "f" else numpy.dtype(numpy.float64)
    scaled = (inside.astype(dtype) - dtype.type(low)) * dtype.type(bins) / dtype.type(high - low)
    positions = numpy.minimum(scaled.astype(numpy.int64), bins - 1)
    return numpy.bincount(positions, minlength=bins).astype(self.dtype)


def _linspace(low: float, high: float, bins: int, dtype: numpy.dtype[Any]) -> Array:
    """bins + 1 edges, counted from the nearer end as PyTorch does."""
    step = dtype.type((high - low) / bins)
    index = numpy.arange(bins + 1).astype(dtype)
    upper = dtype.type(high) - step * (dtype.type(bins) - index)
    return numpy.asarray(numpy.where(index < (bins + 1) // 2, dtype.type(low) + step * index, upper), dtype)


def _count(operator: str, self: Array, edges: list[Array], weight: Array | None, density: bool) -> Array:
    """The histogram of points (…, d) over d rows of edges; the last bin holds its upper edge too."""
    points = promoted(self).reshape(-1, len(edges))
    shape = tuple(len(row) - 1 for row in edges)
    if any(len(row) < 2 for row in edges):
        raise InvalidArgumentError(f"{operator}: expected at least 1 bin in each dimension, got {list(shape)}")
    inside = numpy.ones(points.shape[0], numpy.bool_)
    flat = numpy.zeros(points.shape[0], numpy.int64)
    for axis, row in enumerate(edges):
        column = points[:, axis]
        inside &= (column >= row[0]) & (column <= row[-1])
        position = numpy.searchsorted(row, column, side="right") - 1
        flat = flat * shape[axis] + numpy.clip(position, 0, shape[axis] - 1)
    weights = None if weight is None else promoted(weight).reshape(-1)[inside]
    total = math.prod(shape)
    counts = numpy.bincount(flat[inside], weights=weights, minlength=total).reshape(shape)
    dtype = compute_dtype(self.dtype)
    result = counts.astype(dtype)
    if density:
        result = result / result.sum(dtype=dtype)
        for axis, row in enumerate(edges):
            widths = numpy.diff(row).astype(dtype)
            result = result / widths.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return numpy.asarray(result, self.dtype)


@kernel(KERNELS, "histogram.bin_ct")
def histogram(
    self: Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    values = promoted(self)
    low, high = _outer_edges("histogram", values, None if range is None else (range[0], range[1]))
    edges = _linspace(low, high, _positive("histogram", bins), values.dtype)
    return _count("histogram", self.reshape(-1), [edges], weight, density), edges.astype(self.dtype)


@kernel(KERNELS, "histogram.bins_tensor")
def histogram_edges(
    self: Array,
    bins: Array,
    *,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    return _count("histogram", self.reshape(-1), [promoted(bins)], weight, density), numpy.array(bins)


@kernel(KERNELS, "_histogramdd_bin_edges")
def histogramdd_bin_edges(
    self: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> list[Array]:
    del weight, density  # they change the counts, not the edges
    points = promoted(self).reshape(-1, len(bins))
    edges = []
    for axis, count in enumerate(bins):
        limits = None if range is None else (range[2 * axis], range[2 * axis + 1])
        low, high = _outer_edges("histogramdd", points[:, axis], limits)
        edges.append(_linspace(low, high, _positive("histogramdd", count), points.dtype).astype(self.dtype))
    return edges


@kernel(KERNELS, "_histogramdd_from_bin_cts")
def histogramdd_from_bin_counts(
    self: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    edges = [promoted(row) for row in histogramdd_bin_edges(self, bins, range=range)]
    return _count("histogramdd", self, edges, weight, density)


@kernel(KERNELS, "_histogramdd_from_bin_tensors")
def histogramdd_from_bin_tensors(
    self: Array,
    bins: Sequence[Array],
    *,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    return _count("histogramdd", self, [promoted(row) for row in bins], weight, density)


def _positive(operator: str, bins: int) -> int:
    if bins < 1:
        raise InvalidArgumentError(f"{operator}: argument `bins`: expected at least 1, got {bins}")
    return bins


@kernel(KERNELS, "bincount")
def bincount(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    if self.ndim != 1 or self.dtype.kind not in "iu" or (self.size and self.min() < 0):
        raise InvalidArgumentError(
            f"bincount: argument `self`: expected one dimension of integers that are not negative, got {self.dtype} "
            f"of shape {self.shape}"
        )
    if minlength < 0:
        raise InvalidArgumentError(f"bincount: argument `minlength`: expected 0 or more, got {minlength}")
    positions = self.astype(numpy.int64, copy=False)
    if weights is None:
        return numpy.bincount(positions, minlength=minlength).astype(numpy.int64, copy=False)
    if weights.shape != self.shape:
        raise InvalidArgumentError(
            f"bincount: argument `weights`: expected the shape {self.shape}, got {weights.shape}"
        )
    dtype = numpy.float32 if weights.dtype == numpy.float32 else numpy.float64
    return numpy.bincount(positions, weights.astype(numpy.float64), minlength).astype(dtype)
