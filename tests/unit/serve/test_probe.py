"""Whether rows are independent, tried on functions that stand for methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.spec import SymbolicDim, TensorSpec
from untorch.serve.probe import relates_rows

BATCH = SymbolicDim("s0", 1, 64)
LENGTH = SymbolicDim("s1", 2, 5)
FLOATS = [TensorSpec("x", (BATCH, 4), "float32")]
IDS = [TensorSpec("ids", (BATCH, LENGTH), "int64"), TensorSpec("mask", (BATCH, LENGTH), "bool")]


def random_rows(inputs: Sequence[Any]) -> list[Any]:
    return [np.random.default_rng().standard_normal(inputs[0].shape)]


@pytest.mark.parametrize(
    ("run", "specs", "expected"),
    [
        (lambda inputs: [inputs[0] * 2, None], FLOATS, False),
        (lambda inputs: [inputs[0].astype(ml_dtypes.bfloat16)], FLOATS, False),
        (lambda inputs: [inputs[0] * (1 + 1e-3 * len(inputs[0]))], FLOATS, False),  # rounding
        (lambda inputs: [np.full(len(inputs[0]), np.nan)], FLOATS, False),
        (lambda inputs: [inputs[0].argmax(axis=1)], FLOATS, False),
        (lambda inputs: [inputs[0] - inputs[0].mean(axis=0)], FLOATS, True),
        (lambda inputs: [inputs[0][::-1]], FLOATS, True),
        (lambda inputs: [np.cumsum(inputs[0], axis=0)], FLOATS, True),
        (lambda inputs: [inputs[0][:1]], FLOATS, True),  # other rows than the manifest says
        (random_rows, FLOATS, True),
        (lambda inputs: [np.eye(2)[inputs[0]] * inputs[1][..., None]], IDS, False),
        (lambda inputs: [inputs[0] + inputs[0].sum()], IDS, True),
    ],
)
def test_functions(run: Callable[..., Any], specs: list[TensorSpec], expected: bool) -> None:
    assert relates_rows(run, specs) is expected


def test_what_is_made_up() -> None:
    seen: list[Any] = []

    def run(inputs: Sequence[Any]) -> list[Any]:
        seen.append([array.copy() for array in inputs])
        return [inputs[0]]

    twice = SymbolicDim("2*s1", is_expression=True, rpn=("s1", 2, "*"))
    specs = [*IDS, TensorSpec("h", (BATCH, twice, 3), "bfloat16")]
    assert not relates_rows(run, specs)
    assert [[array.shape for array in call] for call in seen] == [
        [(rows, 5), (rows, 5), (rows, 10, 3)] for rows in (2, 1, 1)
    ]
    assert [array.dtype.name for array in seen[0]] == ["int64", "bool", "bfloat16"]
    assert set(np.unique(seen[0][0])) <= {0, 1}
    relates_rows(run, specs, indices=0)
    assert not seen[-1][0].any()


def test_what_cannot_be_tried_is_joined_as_its_shapes_say() -> None:
    def refuse(inputs: Sequence[Any]) -> list[Any]:
        raise InvalidArgumentError("no such index")

    assert not relates_rows(refuse, FLOATS)
    unknown = SymbolicDim("?", is_expression=True)
    assert not relates_rows(lambda inputs: [inputs[0]], [TensorSpec("x", (BATCH, unknown), "float32")])
    assert not relates_rows(lambda inputs: [inputs[0]], [TensorSpec("x", (BATCH,), "complex64")])
