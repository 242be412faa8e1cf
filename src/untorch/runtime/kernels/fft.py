"""Discrete Fourier transforms over several dimensions: complex to complex, real to complex, complex to real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, axis_of, kernel

KERNELS: dict[str, Callable[..., Any]] = {}


def _factor(operator: str, normalization: int, count: int) -> float:
    """0 leaves the sums as they are, 1 divides by the root of the number of elements, 2 by the number."""
    if normalization not in (0, 1, 2):
        raise InvalidArgumentError(f"{operator}: argument `normalization`: expected 0, 1 or 2, got {normalization}")
    return (1.0, float(numpy.sqrt(max(count, 1))), float(max(count, 1)))[normalization]


def _axes(operator: str, self: Array, dim: Sequence[int]) -> list[int]:
    axes = [axis_of(operator, d, self.ndim) for d in dim]
    if len(set(axes)) != len(axes):
        raise InvalidArgumentError(f"{operator}: argument `dim`: expected every dimension once, got {list(dim)}")
    for axis in axes:
        if self.shape[axis] == 0:
            raise InvalidArgumentError(f"{operator}: dimension {axis} of the shape {self.shape} has no elements")
    return axes


def _by_stride(strides: Sequence[int], axes: Sequence[int]) -> list[int]:
    return sorted(axes, key=lambda axis: -strides[axis])


def _stored(values: Array, strides: Sequence[int], axes: Sequence[int]) -> Array:
    """``values`` in PyTorch's memory layout: the other dimensions first, by their input strides, then ``axes``.

    The compiled model addresses the result by these strides.
    """
    batch = _by_stride(strides, [axis for axis in range(values.ndim) if axis not in axes])
    order = [*batch, *axes]
    inverse = numpy.argsort(order)
    stored: Array = numpy.array(values.transpose(order), order="C")
    return numpy.transpose(stored, inverse)


@kernel(KERNELS, "_fft_c2c")
def fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    axes = _axes("_fft_c2c", self, dim)
    if not axes:
        return numpy.array(self)
    return _c2c(self, axes, normalization, forward)


def _c2c(self: Array, axes: list[int], normalization: int, forward: bool) -> Array:
    count = int(numpy.prod([self.shape[axis] for axis in axes]))
    factor = _factor("_fft_c2c", normalization, count)
    if forward:
        values = numpy.fft.fftn(self, axes=axes) / factor
    else:
        values = numpy.fft.ifftn(self, axes=axes, norm="forward") / factor
    strides = self.strides
    return _stored(values.astype(self.dtype, copy=False), strides, _by_stride(strides, axes))


@kernel(KERNELS, "_fft_r2c")
def fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    axes = _axes("_fft_r2c", self, dim)
    if not axes:
        raise InvalidArgumentError("_fft_r2c: argument `dim`: expected at least one dimension, got none")
    dtype = numpy.result_type(self.dtype, numpy.complex64)
    factor = _factor("_fft_r2c", normalization, int(numpy.prod([self.shape[axis] for axis in axes])))
    values = (numpy.fft.rfftn if onesided else numpy.fft.fftn)(self, axes=axes) / factor
    strides = self.strides
    order = [*_by_stride(strides, axes[:-1]), axes[-1]]  # the halved dimension stays the last
    return _stored(values.astype(dtype, copy=False), strides, order)


@kernel(KERNELS, "_fft_c2r")
def fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    axes = _axes("_fft_c2r", self, dim)
    if not axes or last_dim_size < 1:
        raise InvalidArgumentError(
            f"_fft_c2r: expected at least one dimension in `dim` and a positive `last_dim_size`, got {list(dim)} and "
            f"{last_dim_size}"
        )
    last = axes[-1]
    sizes = [self.shape[axis] for axis in axes[:-1]]
    factor = _factor("_fft_c2r", normalization, int(numpy.prod(sizes)) * last_dim_size)
    partial = _c2c(self, axes[:-1], 0, forward=False) if len(axes) > 1 else self
    values = numpy.fft.irfft(partial, n=last_dim_size, axis=last, norm="forward") / factor
    dtype = numpy.empty(0, self.dtype).real.dtype
    return _stored(values.astype(dtype, copy=False), partial.strides, [last])
