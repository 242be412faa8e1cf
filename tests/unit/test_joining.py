"""Which methods' calls may be joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from untorch.runtime.joining import Joining, joining_of
from untorch.runtime.spec import SymbolicDim, TensorSpec

B = SymbolicDim("s0", 1, 64)
N = SymbolicDim("s1")


def spec(name: str, *shape: Any, **fields: Any) -> TensorSpec:
    return TensorSpec(name, shape, "float32", **fields)


def expression(*rpn: Any) -> SymbolicDim:
    return SymbolicDim("e", is_expression=True, rpn=rpn or None)


def test_joined() -> None:
    assert joining_of([spec("x", B, 4), spec("y", B)], [spec("z", B, N), None]) == Joining(limit=64)
    assert joining_of([spec("x", N, 4)], [spec("z", N, expression("s0", 2, "*"))]) == Joining()


X, Z = spec("x", B, 4), spec("z", B)


@pytest.mark.parametrize(
    ("inputs", "outputs", "has_state", "reason"),
    [
        ([], [Z], False, "the package does not describe the method's inputs"),
        ([X], [], False, "the package does not describe the method's outputs"),
        ([X], [None], False, "the package does not describe the method's outputs"),
        ([X], [Z], True, "the method changes buffers"),
        ([replace(X, mutated=True)], [Z], False, "the method writes into an input"),
        ([spec("x")], [Z], False, "dimension 0 of input 'x' is not dynamic"),
        ([spec("x", 4, B)], [Z], False, "dimension 0 of input 'x' is not dynamic"),
        ([spec("x", expression("s0", 2, "*"))], [Z], False, "dimension 0 of input 'x' is not dynamic"),
        ([X, spec("y", N)], [Z], False, "dimension 0 of input 'y' is not s0"),
        ([X, spec("y")], [Z], False, "dimension 0 of input 'y' is not s0"),
        ([X], [spec("z", 4)], False, "dimension 0 of output 'z' is not s0"),
        ([X], [spec("z", expression("s0", 1, "+"))], False, "dimension 0 of output 'z' is not s0"),
        ([X], [spec("z", B, B)], False, "s0 is also another dimension of output 'z'"),
        ([spec("x", B, expression("s0", 2, "*"))], [Z], False, "s0 is also another dimension of input 'x'"),
        ([X], [spec("z", B, expression())], False, "s0 is also another dimension of output 'z'"),
        ([spec("x", B, 4, contiguous=False, strides=(1, B))], [Z], False, "s0 is also another dimension of input 'x'"),
        ([spec("x", B, 4, contiguous=False, strides=(1, 64))], [Z], False, "input 'x' is not row-major"),
    ],
)
def test_not_joined(inputs: list[Any], outputs: list[Any], has_state: bool, reason: str) -> None:
    assert joining_of(inputs, outputs, has_state).reason == reason
