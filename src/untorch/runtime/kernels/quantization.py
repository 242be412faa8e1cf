"""Fake quantisation: values rounded to what an integer grid can hold, in floating point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, axis_of, kernel, promoted

KERNELS: dict[str, Callable[..., Any]] = {}


def _fake_quantize(
    operator: str, self: Array, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    """The rounded values, and where the grid was wide enough, both in the memory order of ``self``."""
    if quant_min > quant_max:
        raise InvalidArgumentError(
            f"{operator}: expected `quant_min` up to `quant_max`, got {quant_min} and {quant_max}"
        )
    values = promoted(self)
    inverse = numpy.float32(1) / numpy.asarray(scale, numpy.float32)
    grid = numpy.rint(values * inverse) + zero_point
    inside = (grid >= quant_min) & (grid <= quant_max)
    # NaN goes to the low end, as the comparison with it decides.
    clipped = numpy.fmin(numpy.fmax(grid, quant_min), quant_max)
    result = numpy.empty_like(self, order="K", subok=False)
    result[...] = ((clipped - zero_point) * numpy.asarray(scale, numpy.float32)).astype(self.dtype)
    mask = numpy.empty_like(self, dtype=numpy.bool_, order="K", subok=False)
    mask[...] = inside
    return result, mask


@kernel(KERNELS, "fake_quantize_per_tensor_affine_cachemask")
def fake_quantize_per_tensor(
    self: Array, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    return _fake_quantize("fake_quantize_per_tensor_affine", self, scale, zero_point, quant_min, quant_max)


@kernel(KERNELS, "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize_per_tensor_of_tensors(
    self: Array, scale: Array, zero_point: Array, fake_quant_enabled: Array, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    if int(fake_quant_enabled.reshape(-1)[0]) == 0:
        return self.copy(order="K"), numpy.ones_like(self, dtype=numpy.bool_)
    factor, offset = float(scale.reshape(-1)[0]), int(zero_point.reshape(-1)[0])
    return _fake_quantize("fake_quantize_per_tensor_affine", self, factor, offset, quant_min, quant_max)


@kernel(KERNELS, "fake_quantize_per_channel_affine_cachemask")
def fake_quantize_per_channel(
    self: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    """One scale and zero point (channels) for each index along ``axis``."""
    operator = "fake_quantize_per_channel_affine"
    axis = axis_of(operator, axis, self.ndim)
    if scale.shape != (self.shape[axis],) or zero_point.shape != scale.shape:
        raise InvalidArgumentError(
            f"{operator}: expected {self.shape[axis]} scales and zero points, got the shapes {scale.shape} and "
            f"{zero_point.shape}"
        )
    shape = [-1 if i == axis else 1 for i in range(self.ndim)]
    offsets = zero_point.reshape(shape)
    return _fake_quantize(operator, self, scale.reshape(shape), offsets, quant_min, quant_max)
