"""Joining requests to one call, and splitting its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.integrations.joining import groups, join, split
from untorch.runtime.columns import BatchDim
from untorch.runtime.spec import SymbolicDim


def rows(count: int, width: int = 3, dtype: Any = np.float32, other: int | None = None) -> list[Any]:
    return [np.ones((count, width), dtype), np.ones(count if other is None else other)]


def batch(most: int | None = 8) -> BatchDim:
    return BatchDim(SymbolicDim("b", 1, most))


@pytest.mark.parametrize(
    ("requests", "most", "expected"),
    [
        ([rows(1), rows(2), rows(3)], 8, [[0, 1, 2]]),
        ([rows(5), rows(4), rows(4)], 8, [[0], [1, 2]]),
        ([rows(5), rows(40)], None, [[0, 1]]),
        ([rows(1), rows(1, 4), rows(1), rows(1, dtype=np.int64)], 8, [[0, 2], [1], [3]]),
        ([rows(1, other=2), rows(2, other=1), rows(1)], 8, [[0], [1], [2]]),  # together they would fit, mixed
        ([[np.ones(())], [np.ones(())]], 8, [[0], [1]]),
        ([[object()], [object()]], 8, [[0], [1]]),
        ([], 8, []),
    ],
)
def test_groups(requests: Any, most: int | None, expected: Any) -> None:
    assert sorted(groups(batch(most), requests)) == expected


def test_without_a_batch_dimension() -> None:
    assert list(groups(None, [rows(1), rows(1)])) == [[0], [1]]


def test_join_and_split() -> None:
    rng = np.random.default_rng(0)
    requests = [[rng.random((count, 2)), rng.random(count)] for count in (3, 1, 2)]
    joined = join(requests)
    assert [array.shape for array in joined] == [(6, 2), (6,)]
    parts = split([array * 2 for array in joined], [3, 1, 2])
    for part, request in zip(parts, requests, strict=True):
        for array, given in zip(part, request, strict=True):
            np.testing.assert_array_equal(array, 2 * given)
    assert join(requests[:1])[0] is requests[0][0]  # a single request is not copied
    assert split([1.0], [7]) == [[1.0]]
