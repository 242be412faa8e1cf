"""Joins the inputs of several requests along the batch dimension, and splits the outputs of the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from untorch.runtime.columns import BatchDim

__all__ = ["groups", "join", "split"]


def groups(batch: BatchDim | None, requests: Sequence[Sequence[Any]]) -> Iterator[list[int]]:
    """Which requests one call serves, by their places: NumPy arrays of the same dtypes and of the same shapes but for
    their rows, and together no more rows than a call takes. Every place comes once.
    """
    import numpy

    open_groups: dict[Any, tuple[list[int], int]] = {}
    for place, arrays in enumerate(requests):
        same = all(isinstance(array, numpy.ndarray) and array.ndim for array in arrays)
        if batch is None or not same or len({len(array) for array in arrays}) != 1:
            yield [place]  # rows that do not agree must not agree by another's
            continue
        key = tuple((array.shape[1:], array.dtype) for array in arrays)
        rows = len(arrays[0])
        places, total = open_groups.get(key, ([], 0))
        if places and batch.max is not None and total + rows > batch.max:
            yield places
            places, total = [], 0
        places.append(place)
        open_groups[key] = places, total + rows
    yield from (places for places, _ in open_groups.values())


def join(requests: Sequence[Sequence[Any]]) -> list[Any]:
    """The inputs of one call."""
    import numpy

    if len(requests) == 1:
        return list(requests[0])
    return [numpy.concatenate(arrays) for arrays in zip(*requests, strict=True)]


def split(outputs: Sequence[Any], rows: Sequence[int]) -> list[list[Any]]:
    """The outputs of each request, in the order in which they were joined."""
    if len(rows) == 1:
        return [list(outputs)]
    parts, begin = [], 0
    for count in rows:
        parts.append([output[begin : begin + count] for output in outputs])
        begin += count
    return parts
