"""Antialiased resizing of images (the filters of Pillow): linear, cubic and Lanczos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, kernel

KERNELS: dict[str, Callable[..., Any]] = {}

_Filter = Callable[[Array], Array]


def _linear(x: Array) -> Array:
    return numpy.asarray(numpy.maximum(1 - abs(x), 0))


def _cubic(x: Array) -> Array:
    """Keys' kernel with a = -0.5."""
    a, x = -0.5, abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return numpy.where(x < 1, near, numpy.where(x < 2, far, 0))


def _lanczos(x: Array) -> Array:
    return numpy.where(abs(x) < 3, numpy.sinc(x) * numpy.sinc(x / 3), 0)


def _weights(size: int, target: int, scale: float, filter_of: _Filter, support: float) -> Array:
    """The matrix (target, size) that resizes one dimension: each row a filter as wide as the step, summing to 1."""
    support = support * scale if scale >= 1 else support
    inverse = 1 / scale if scale >= 1 else 1.0
    centre = scale * (numpy.arange(target) + 0.5)
    first = numpy.maximum((centre - support + 0.5).astype(numpy.int64), 0)
    last = numpy.minimum((centre + support + 0.5).astype(numpy.int64), size)
    position = numpy.arange(size)
    values = filter_of((position[None, :] - centre[:, None] + 0.5) * inverse)
    values = numpy.where((position >= first[:, None]) & (position < last[:, None]), values, 0)
    total = values.sum(axis=1, keepdims=True)
    return numpy.asarray(values / numpy.where(total == 0, 1, total))


def _scale(size: int, target: int, align_corners: bool, factor: float | None) -> float:
    if align_corners:
        return (size - 1) / (target - 1) if target > 1 else 0.0
    return 1 / factor if factor is not None and factor > 0 else size / target


def _resize(
    operator: str,
    self: Array,
    output_size: Sequence[int],
    align_corners: bool,
    factors: tuple[float | None, float | None],
    filter_of: _Filter,
    support: float,
) -> Array:
    if self.ndim != 4 or len(output_size) != 2 or min(output_size) < 1 or min(self.shape[1:]) < 1:
        raise InvalidArgumentError(
            f"{operator}: expected 4 dimensions with elements and an output size of 2 positive numbers, got the shape "
            f"{self.shape} and {list(output_size)}"
        )
    dtype = numpy.dtype(numpy.float64 if self.dtype.kind in "iuf" and self.dtype.itemsize == 8 else numpy.float32)
    values = self.astype(dtype)
    for axis, target, factor in zip((3, 2), reversed(output_size), reversed(factors), strict=True):
        size = values.shape[axis]
        if size == target and factor in (None, 1.0):
            continue
        scale = _scale(size, target, align_corners, factor)
        matrix = _weights(size, target, scale, filter_of, support).astype(dtype)
        values = values @ matrix.T if axis == 3 else matrix @ values
        if self.dtype.kind in "iu":  # each pass ends in the image's own dtype, as in Pillow
            limits = numpy.iinfo(self.dtype)
            values = numpy.clip(numpy.floor(values + 0.5), limits.min, limits.max)
    result = values.astype(self.dtype)
    if _channels_last(self):
        stored: Array = numpy.array(result.transpose(0, 2, 3, 1), order="C")
        return numpy.transpose(stored, (0, 3, 1, 2))
    return numpy.array(result, order="C")


def _channels_last(self: Array) -> bool:
    return not self.flags.c_contiguous and bool(self.transpose(0, 2, 3, 1).flags.c_contiguous)


@kernel(KERNELS, "_upsample_bilinear2d_aa")
def upsample_bilinear2d_aa(
    self: Array,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Array:
    scales = (scales_h, scales_w)
    return _resize("_upsample_bilinear2d_aa", self, output_size, align_corners, scales, _linear, 1.0)


@kernel(KERNELS, "_upsample_bicubic2d_aa")
def upsample_bicubic2d_aa(
    self: Array,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Array:
    scales = (scales_h, scales_w)
    return _resize("_upsample_bicubic2d_aa", self, output_size, align_corners, scales, _cubic, 2.0)


@kernel(KERNELS, "_upsample_lanczos2d_aa")
def upsample_lanczos2d_aa(
    self: Array,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Array:
    scales = (scales_h, scales_w)
    return _resize("_upsample_lanczos2d_aa", self, output_size, align_corners, scales, _lanczos, 3.0)
