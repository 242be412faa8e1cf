"""torchvision's operators in plain PyTorch, and torchvision itself with them where its library does not load.

The wheels' library is linked against CUDA, which a CPU build of torch does not have. ``make test`` puts the package into
build/torchvision, apart from the environment: other packages would import it.
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "build" / "torchvision"

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> "
    "(Tensor, Tensor)",
    "ps_roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> "
    "(Tensor, Tensor)",
    "deform_conv2d": "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
}


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """torchvision's CPU kernel, word for word in what rounds: areas and overlaps in the boxes' dtype."""
    order = scores.sort(stable=True, descending=True).indices.tolist()
    areas = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    kept: list[int] = []
    gone: set[int] = set()
    for i in order:
        if i in gone:
            continue
        kept.append(i)
        low = torch.maximum(dets[i, :2], dets[:, :2])
        high = torch.minimum(dets[i, 2:], dets[:, 2:])
        size = (high - low).clamp(min=0)
        common = size[:, 0] * size[:, 1]
        overlap = common / (areas[i] + areas - common)
        gone |= set(torch.nonzero(overlap.double() > iou_threshold)[:, 0].tolist())
    return torch.tensor(kept, dtype=torch.int64)


def _bilinear(plane: torch.Tensor, y: torch.Tensor, x: torch.Tensor, border: bool) -> torch.Tensor:
    """Samples of planes [channels, height, width] at positions of any shape; border: the outermost pixels reach 1 out."""
    height, width = plane.shape[-2:]
    inside = (y > -1) & (y < height) & (x > -1) & (x < width)
    if border:
        inside = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
        y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    top, left = y.floor(), x.floor()
    total = torch.zeros((plane.shape[0], *y.shape), dtype=plane.dtype)
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        there = (row >= 0) & (row < height) & (column >= 0) & (column < width) & inside
        weight = (1 - (y - row).abs()) * (1 - (x - column).abs())
        values = plane[:, row.clamp(0, height - 1).long(), column.clamp(0, width - 1).long()]
        total += torch.where(there, weight * values, torch.zeros((), dtype=plane.dtype))
    return total


def _grid(start: torch.Tensor, size: torch.Tensor, bins: int, ratio: int) -> torch.Tensor:
    """Sampling positions along one axis of a region: [bins, samples]."""
    step = size / bins
    count = ratio if ratio > 0 else max(math.ceil(float(step)), 0)
    within = torch.arange(count, dtype=start.dtype) + 0.5
    return start + step * torch.arange(bins)[:, None] + within * step / max(count, 1)


def roi_align(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int,
    sampling_ratio: int, aligned: bool,
) -> torch.Tensor:  # fmt: skip
    result = input.new_zeros((rois.shape[0], input.shape[1], pooled_height, pooled_width))
    for i, roi in enumerate(rois):
        x1, y1, x2, y2 = roi[1:] * spatial_scale - (0.5 if aligned else 0.0)
        height, width = (y2 - y1, x2 - x1) if aligned else ((y2 - y1).clamp(min=1), (x2 - x1).clamp(min=1))
        y, x = _grid(y1, height, pooled_height, sampling_ratio), _grid(x1, width, pooled_width, sampling_ratio)
        samples = _bilinear(input[int(roi[0])], *torch.broadcast_tensors(y[:, None, :, None], x[None, :, None]), True)
        result[i] = samples.sum((-1, -2)) / max(y.shape[1] * x.shape[1], 1)
    return result


def ps_roi_align(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int,
    sampling_ratio: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    result, channels = _ps_results(input, rois, pooled_height, pooled_width)
    for i, roi in enumerate(rois):
        x1, y1, x2, y2 = roi[1:] * spatial_scale - 0.5
        y, x = _grid(y1, y2 - y1, pooled_height, sampling_ratio), _grid(x1, x2 - x1, pooled_width, sampling_ratio)
        samples = _bilinear(input[int(roi[0])], *torch.broadcast_tensors(y[:, None, :, None], x[None, :, None]), True)
        means = samples.sum((-1, -2)) / (y.shape[1] * x.shape[1])
        result[i] = _own_channels(means, result.shape[1])
    return result, channels


def _ps_results(input: torch.Tensor, rois: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the values, and the channel that each comes from."""
    bins = rows * columns
    channels = torch.arange(input.shape[1], dtype=torch.int32).view(1, input.shape[1] // bins, rows, columns)
    channels = channels.repeat(rois.shape[0], 1, 1, 1)
    return input.new_zeros(channels.shape), channels


def _own_channels(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Of [channels, rows, columns] for each bin the channel that belongs to it."""
    rows, columns = values.shape[-2:]
    bins = values.view(groups, rows * columns, rows * columns)
    return bins.diagonal(dim1=1, dim2=2).reshape(groups, rows, columns)


def _spans(low: torch.Tensor, high: torch.Tensor, bins: int, extra: int, limit: int) -> list[tuple[int, int]]:
    """The pixels of each bin along one axis."""
    start = int(low.round())
    step = torch.tensor(max(int(high.round()) - start + extra, 1), dtype=low.dtype) / bins
    spans = []
    for i in range(bins):
        first, last = math.floor(i * step) + start, math.ceil((i + 1) * step) + start
        spans.append((min(max(first, 0), limit), min(max(last, 0), limit)))
    return spans


def roi_pool(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    result = input.new_zeros((rois.shape[0], input.shape[1], pooled_height, pooled_width))
    index = torch.full(result.shape, -1, dtype=torch.int32)
    width = input.shape[3]
    for i, roi in enumerate(rois):
        x1, y1, x2, y2 = roi[1:] * spatial_scale
        for r, (top, bottom) in enumerate(_spans(y1, y2, pooled_height, 1, input.shape[2])):
            for c, (left, right) in enumerate(_spans(x1, x2, pooled_width, 1, width)):
                if bottom > top and right > left:
                    part = input[int(roi[0]), :, top:bottom, left:right].flatten(1)
                    result[i, :, r, c], at = part.max(1)
                    index[i, :, r, c] = (at // (right - left) + top) * width + at % (right - left) + left
    return result, index


def ps_roi_pool(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    result, channels = _ps_results(input, rois, pooled_height, pooled_width)
    for i, roi in enumerate(rois):
        x1, y1, x2, y2 = roi[1:] * spatial_scale
        means = input.new_zeros((input.shape[1], pooled_height, pooled_width))
        for r, (top, bottom) in enumerate(_spans(y1, y2, pooled_height, 0, input.shape[2] - 1)):
            for c, (left, right) in enumerate(_spans(x1, x2, pooled_width, 0, input.shape[3] - 1)):
                if bottom > top and right > left:
                    means[:, r, c] = input[int(roi[0]), :, top:bottom, left:right].mean((1, 2))
        result[i] = _own_channels(means, result.shape[1])
    return result, channels


def deform_conv2d(
    input: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor,
    stride_h: int, stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int,
    offset_groups: int, use_mask: bool,
) -> torch.Tensor:  # fmt: skip
    batch, channels = input.shape[:2]
    rows, columns = weight.shape[2:]
    height, width = offset.shape[2:]
    moves = offset.view(batch, offset_groups, rows * columns, 2, height, width)
    scales = mask.view(batch, offset_groups, rows * columns, height, width) if use_mask else None
    samples = input.new_zeros((batch, channels, rows * columns, height, width))
    share = channels // offset_groups
    for b in range(batch):
        for group in range(offset_groups):
            for place in range(rows * columns):
                y0, x0 = place // columns * dilation_h - pad_h, place % columns * dilation_w - pad_w
                y = torch.arange(height)[:, None] * stride_h + y0 + moves[b, group, place, 0]
                x = torch.arange(width)[None] * stride_w + x0 + moves[b, group, place, 1]
                values = _bilinear(input[b, group * share : (group + 1) * share], y, x, False)
                if scales is not None:
                    values = values * scales[b, group, place]
                samples[b, group * share : (group + 1) * share, place] = values
    parts = [
        torch.einsum("bckhw,ock->bohw", columns_of, filters.flatten(2))
        for columns_of, filters in zip(samples.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
    ]
    return torch.cat(parts, 1) + bias[:, None, None]


def _fake_pool(input: torch.Tensor, rois: torch.Tensor, _: float, rows: int, columns: int, *rest: Any) -> Any:
    return input.new_empty((rois.shape[0], input.shape[1], rows, columns))


def _fake_roi_pool(input: torch.Tensor, rois: torch.Tensor, _: float, rows: int, columns: int) -> Any:
    out = input.new_empty((rois.shape[0], input.shape[1], rows, columns))
    return out, torch.empty_like(out, dtype=torch.int32)


def _fake_ps(input: torch.Tensor, rois: torch.Tensor, _: float, rows: int, columns: int, *rest: Any) -> Any:
    out = input.new_empty((rois.shape[0], input.shape[1] // (rows * columns), rows, columns))
    return out, torch.empty_like(out, dtype=torch.int32)


def _fake_deform(input: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, *rest: Any) -> Any:
    return input.new_empty((input.shape[0], weight.shape[0], *offset.shape[2:]))


_FAKES: dict[str, Callable[..., Any]] = {
    "roi_align": _fake_pool, "roi_pool": _fake_roi_pool, "ps_roi_align": _fake_ps, "ps_roi_pool": _fake_ps,
    "deform_conv2d": _fake_deform,
}  # fmt: skip


def import_torchvision() -> Any:
    """torchvision from build/torchvision; None where it is not there. For a process that does nothing else."""
    if not (FOLDER / "torchvision").is_dir():
        return None
    sys.path.insert(0, str(FOLDER))
    functions = globals()
    for name, schema in SCHEMAS.items():
        torch.library.define(f"torchvision::{name}", schema)
        if name in functions:
            torch.library.impl(f"torchvision::{name}", "CPU", functions[name])
        if name in _FAKES:  # torchvision brings that of nms itself
            torch.library.register_fake(f"torchvision::{name}", _FAKES[name])
    import torchvision
    import torchvision.extension

    torchvision.extension._has_ops = lambda: True
    return torchvision
