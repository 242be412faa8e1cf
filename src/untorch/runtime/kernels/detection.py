"""The operators of torchvision that detection models export: non-maximum suppression and region-of-interest align."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, kernel, promoted

KERNELS: dict[str, Callable[..., Any]] = {}


@kernel(KERNELS, "torchvision::nms")
def nms(dets: Array, scores: Array, iou_threshold: float) -> Array:
    """Indices of the boxes (n, 4) of corners x1, y1, x2, y2 to keep, best score first.

    A box goes when its intersection over union with a better one that stays is above ``iou_threshold``.
    """
    if dets.ndim != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
        raise InvalidArgumentError(
            f"torchvision::nms: expected boxes (n, 4) and scores (n), got the shapes {dets.shape} and {scores.shape}"
        )
    order = numpy.argsort(-promoted(scores), kind="stable")
    x1, y1, x2, y2 = promoted(dets)[order].T
    areas = (x2 - x1) * (y2 - y1)
    threshold = areas.dtype.type(iou_threshold)
    alive = numpy.ones(order.size, numpy.bool_)
    for i in range(order.size):
        if not alive[i]:
            continue
        rest = slice(i + 1, None)
        width = numpy.maximum(numpy.minimum(x2[i], x2[rest]) - numpy.maximum(x1[i], x1[rest]), 0)
        height = numpy.maximum(numpy.minimum(y2[i], y2[rest]) - numpy.maximum(y1[i], y1[rest]), 0)
        common = width * height
        alive[rest] &= ~(common / (areas[i] + areas[rest] - common) > threshold)
    return order[alive].astype(numpy.int64)


def _samples(start: float, size: float, bins: int, ratio: int, length: int) -> tuple[Array, Array, Array, Array]:
    """Where one axis of a region is sampled: lower and upper pixels and their weights, each (bins, samples)."""
    count = ratio if ratio > 0 else max(int(numpy.ceil(size / bins)), 0)
    step = size / bins
    position = start + step * (numpy.arange(bins)[:, None] + (numpy.arange(count)[None, :] + 0.5) / max(count, 1))
    inside = (position >= -1) & (position <= length)
    position = numpy.maximum(position, 0)
    low = numpy.minimum(position.astype(numpy.int64), length - 1)
    high = numpy.minimum(low + 1, length - 1)
    upper = numpy.where(low >= length - 1, 0, position - low)
    return low, high, numpy.where(inside, 1 - upper, 0), numpy.where(inside, upper, 0)


@kernel(KERNELS, "torchvision::roi_align")
def roi_align(
    input: Array,
    rois: Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Array:
    """Averages of bilinear samples of ``input`` (batch, channels, height, width) in a grid over each region.

    ``rois`` (n, 5) holds the image of the batch and the corners x1, y1, x2, y2; the result is (n, channels,
    pooled_height, pooled_width). ``sampling_ratio`` is the number of samples along each side of a bin, chosen from the
    region's size when it is not positive.
    """
    if input.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5 or min(pooled_height, pooled_width) < 1:
        raise InvalidArgumentError(
            f"torchvision::roi_align: expected an input of 4 dimensions, regions (n, 5) and a pooled size above 0, got "
            f"the shapes {input.shape} and {rois.shape} and the size ({pooled_height}, {pooled_width})"
        )
    values, regions = promoted(input), promoted(rois).astype(numpy.float64)
    height, width = input.shape[2:]
    result = numpy.zeros((rois.shape[0], input.shape[1], pooled_height, pooled_width), values.dtype)
    offset = 0.5 if aligned else 0.0
    for index, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (corner * spatial_scale - offset for corner in corners)
        region_width, region_height = x2 - x1, y2 - y1
        if not aligned:
            region_width, region_height = max(region_width, 1.0), max(region_height, 1.0)
        rows = _interpolation(_samples(y1, region_height, pooled_height, sampling_ratio, height), height)
        columns = _interpolation(_samples(x1, region_width, pooled_width, sampling_ratio, width), width)
        result[index] = rows.astype(values.dtype) @ values[int(image)] @ columns.astype(values.dtype).T
    return result.astype(input.dtype, copy=False)


def _interpolation(samples: tuple[Array, Array, Array, Array], length: int) -> Array:
    """The matrix (bins, length) that averages the samples of each bin: sampling is separable in the two axes."""
    low, high, lower_weight, upper_weight = samples
    bins, count = low.shape
    matrix = numpy.zeros((bins, length))
    rows = numpy.arange(bins)[:, None]
    numpy.add.at(matrix, (rows, low), lower_weight)
    numpy.add.at(matrix, (rows, high), upper_weight)
    return numpy.asarray(matrix / max(count, 1))
