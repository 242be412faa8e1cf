"""TensorSpec: what a manifest says of inputs and outputs, and how it prints."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.runtime.spec import SymbolicDim, TensorSpec, parse_specs

BATCH = {"symbol": "batch", "min": 1, "max": 64}
ENTRY = {"name": "x", "dtype": "float32", "shape": [BATCH, 4], "contiguous": True, "strides": [4, 1], "mutated": False}


def test_a_spec_has_name_shape_and_dtype() -> None:
    (spec,) = parse_specs([ENTRY])
    assert spec is not None
    assert (spec.name, spec.shape, spec.dtype) == ("x", (SymbolicDim("batch", 1, 64), 4), "float32")
    assert (spec.contiguous, spec.strides, spec.mutated, spec.device) == (True, (4, 1), False, None)
    assert str(spec) == "x: float32[batch, 4]"
    assert repr(spec) == "TensorSpec(x: float32[batch=1..64, 4])"
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "y"  # type: ignore[misc]
    assert len({spec, *parse_specs([ENTRY])}) == 1


@pytest.mark.parametrize(
    ("entry", "text", "full"),
    [
        ({"symbol": "s0", "min": 2, "max": None}, "s0", "s0≥2"),
        ({"symbol": "s0", "min": None, "max": 8}, "s0", "s0=0..8"),
        ({"expr": "2*s0", "rpn": ["s0", 2, "*"]}, "2*s0", "2*s0"),
        ({"expr": "sqrt(s0)", "rpn": None}, "sqrt(s0)", "sqrt(s0)"),
        ({}, "?", "?"),
        (None, "?", "?"),
    ],
)
def test_sizes_that_vary(entry: Any, text: str, full: str) -> None:
    (spec,) = parse_specs([{**ENTRY, "shape": [entry]}])
    assert spec is not None
    assert (str(spec.shape[0]), repr(spec.shape[0])) == (text, full)


def test_constants_are_left_out_and_none_stays() -> None:
    assert parse_specs([{"name": "flag", "constant": True}, None]) == (None,)
    assert parse_specs(None) == ()


@pytest.mark.parametrize(
    "items",
    [5, [5], [{}], [{"name": "x"}], [{**ENTRY, "shape": 5}], [{**ENTRY, "shape": [{"symbol": "s", "min": "x"}]}]],
)
def test_damaged_entries_are_refused(items: Any) -> None:
    with pytest.raises(untorch.InvalidFileError, match="the manifest's inputs or outputs are damaged: "):
        parse_specs(items)


def test_methods_tell_their_specs(own_package: pathlib.Path) -> None:
    with untorch.load(own_package) as program:
        (spec,) = program.linear.inputs
        assert isinstance(spec, TensorSpec)
        assert spec.shape[1] == 4
        assert isinstance(spec.shape[0], SymbolicDim)
        assert (spec.shape[0].min, spec.shape[0].max) == (1, 64)
        outputs = program["types"].outputs
        assert isinstance(outputs, tuple)
        assert outputs[-1] is None
        arrays = {s.name: np.zeros([d if isinstance(d, int) else d.min for d in s.shape], s.dtype) for s in (spec,)}
        np.testing.assert_array_equal(program.linear.run(arrays)[0], [[10, 20, 30]])
