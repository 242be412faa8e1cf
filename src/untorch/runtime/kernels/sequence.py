"""Packed sequences, complex numbers from their parts, masked softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, axis_of, kernel, promoted

KERNELS: dict[str, Callable[..., Any]] = {}


@kernel(KERNELS, "_pack_padded_sequence")
def pack_padded_sequence(input: Array, lengths: Array, batch_first: bool) -> tuple[Array, Array]:
    """The steps of all sequences one after the other, and how many sequences reach each step."""
    steps = input.swapaxes(0, 1) if batch_first else input
    if lengths.ndim != 1 or lengths.size == 0 or lengths.size != steps.shape[1]:
        raise InvalidArgumentError(
            f"_pack_padded_sequence: argument `lengths`: expected {steps.shape[1]} lengths, got the shape "
            f"{lengths.shape}"
        )
    if lengths[-1] < 1 or bool((numpy.diff(lengths) > 0).any()) or lengths[0] > steps.shape[0]:
        raise InvalidArgumentError(
            f"_pack_padded_sequence: argument `lengths`: expected lengths from {steps.shape[0]} down to 1, longest "
            f"first, got {lengths.tolist()}"
        )
    present = numpy.arange(int(lengths[0]))[:, None] < lengths[None, :]
    return numpy.ascontiguousarray(steps[: int(lengths[0])][present]), present.sum(axis=1).astype(numpy.int64)


@kernel(KERNELS, "_pad_packed_sequence")
def pad_packed_sequence(
    data: Array,
    batch_sizes: Array,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[Array, Array]:
    steps = batch_sizes.size
    if steps == 0 or 0 < total_length < steps:
        raise InvalidArgumentError(
            f"_pad_packed_sequence: argument `total_length`: expected at least {steps}, got {total_length}"
        )
    length = total_length if total_length > 0 else steps
    padded = numpy.full((length, int(batch_sizes[0]), *data.shape[1:]), padding_value, data.dtype)
    present = numpy.arange(padded.shape[1])[None, :] < batch_sizes[:, None]
    padded[:steps][present] = data
    return padded.swapaxes(0, 1) if batch_first else padded, present.sum(axis=0).astype(numpy.int64)


@kernel(KERNELS, "complex")
def complex_of(real: Array, imag: Array) -> Array:
    parts = promoted(real), promoted(imag)
    result = numpy.empty(numpy.broadcast_shapes(real.shape, imag.shape), numpy.result_type(*parts, numpy.complex64))
    result.real, result.imag = parts
    return result


@kernel(KERNELS, "_masked_softmax")
def masked_softmax(self: Array, mask: Array, dim: int | None = None, mask_type: int | None = None) -> Array:
    """Softmax over what ``mask`` leaves; True hides an element, and a row with nothing left is 0.

    ``mask_type`` 0 is a mask (length, length), 1 is (batch, length), both for scores (batch, heads, length, length);
    2 has the shape of ``self``.
    """
    if mask_type not in (None, 0, 1, 2):
        raise InvalidArgumentError(f"_masked_softmax: argument `mask_type`: expected 0, 1 or 2, got {mask_type}")
    hidden = mask.astype(numpy.bool_, copy=False)
    if mask_type == 1:
        hidden = hidden[:, None, None, :]
    axis = axis_of("_masked_softmax", self.ndim - 1 if dim is None else dim, self.ndim)
    scores = numpy.where(hidden, -numpy.inf, promoted(self))
    largest = scores.max(axis=axis, keepdims=True, initial=-numpy.inf)
    exponentials = numpy.exp(scores - numpy.where(numpy.isneginf(largest), 0, largest))
    total = exponentials.sum(axis=axis, keepdims=True)
    return numpy.array(exponentials / numpy.where(total == 0, 1, total), self.dtype, order="C")


@kernel(KERNELS, "conv_tbc")
def conv_tbc(self: Array, weight: Array, bias: Array, pad: int = 0) -> Array:
    """Convolution over time: input (time, batch, in), weight (width, in, out), bias (out)."""
    if self.ndim != 3 or weight.ndim != 3 or self.shape[2] != weight.shape[1] or bias.shape != weight.shape[2:]:
        raise InvalidArgumentError(
            f"conv_tbc: expected an input (time, batch, in), a weight (width, in, out) and a bias (out), got the "
            f"shapes {self.shape}, {weight.shape} and {bias.shape}"
        )
    steps = self.shape[0] + 2 * pad - weight.shape[0] + 1
    if steps < 0 or pad < 0:
        raise InvalidArgumentError(
            f"conv_tbc: the weight is {weight.shape[0]} wide, expected no more than the {self.shape[0]} steps with "
            f"their padding of {pad} on each side"
        )
    values = numpy.pad(promoted(self), ((pad, pad), (0, 0), (0, 0)))
    result = numpy.empty((steps, self.shape[1], weight.shape[2]), values.dtype)
    result[...] = promoted(bias)
    for offset, factors in enumerate(promoted(weight)):
        result += values[offset : offset + steps] @ factors
    return result.astype(self.dtype, copy=False)
