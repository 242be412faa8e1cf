"""Inputs by the C functions of DLPack's exchange, and when their own __dlpack__ is asked instead."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import untorch
from tests import exchange


@pytest.fixture
def method(own_package: pathlib.Path) -> Iterator[untorch.Method]:
    with untorch.load(own_package) as program:
        yield program.linear


def values_for(method: untorch.Method) -> np.ndarray[Any, Any]:
    (spec,) = method.inputs
    shape = [dim if isinstance(dim, int) else 3 for dim in spec.shape]
    return np.random.default_rng(0).standard_normal(shape).astype(spec.dtype)


def given(values: np.ndarray[Any, Any], kind: type[Any], asked: list[str], **attributes: Any) -> Any:
    """An array of the type that notes when its __dlpack__ is called."""

    def dlpack(_self: Any, **options: Any) -> Any:
        asked.append("dlpack")
        return values.__dlpack__(**options)

    kind.__dlpack__, kind.__dlpack_device__ = dlpack, lambda _self: (1, 0)
    made = kind()
    made.values = values
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("options", [{}, {"chained": True}])
def test_the_types_functions_are_called(method: untorch.Method, options: dict[str, Any]) -> None:
    values, asked = values_for(method), list[str]()
    x = given(values, exchange.make_type(exchange.of_numpy, **options), asked, requires_grad=False)
    np.testing.assert_array_equal(method(x), method(values))
    assert asked == []
    gc.collect()
    assert not exchange.alive  # deleted once


@pytest.mark.parametrize("why", ["gradient", "subclass", "version", "failure", "no capsule"])
def test_the_object_is_asked(method: untorch.Method, why: str) -> None:
    values, asked = values_for(method), list[str]()
    kind = exchange.make_type(exchange.of_numpy, major=2 if why == "version" else 1, fails=why == "failure")
    if why == "subclass":
        kind = type("Sub", (kind,), {})
    if why == "no capsule":
        kind.__dlpack_c_exchange_api__ = 5
    x = given(values, kind, asked, **({"requires_grad": True} if why == "gradient" else {}))
    np.testing.assert_array_equal(method(x), method(values))
    assert asked == ["dlpack"]
    assert not exchange.alive


def test_complex_values_may_be_conjugated(method: untorch.Method) -> None:
    """Which only __dlpack__ can refuse."""
    values, asked = values_for(method).astype(np.complex64), list[str]()
    x = given(values, exchange.make_type(exchange.of_numpy), asked)
    with pytest.raises(untorch.InvalidArgumentError, match="complex64"):
        method(x)
    assert asked == ["dlpack"]
    assert not exchange.alive


@pytest.mark.slow
def test_tensors_of_torch(method: untorch.Method) -> None:
    """With a gradient they are refused as by __dlpack__; shape, strides and lifetime are the tensor's."""
    torch = pytest.importorskip("torch")
    values = values_for(method)
    expected = method(values)
    x = torch.cat([torch.zeros(2, values.shape[1]), torch.from_numpy(values)])
    np.testing.assert_array_equal(method(x[2:]), expected)
    with pytest.raises(untorch.InvalidArgumentError, match=r"strides \[1, 3\]"):
        method(torch.from_numpy(values).t().contiguous().t())
    with pytest.raises(untorch.InvalidArgumentError, match="require gradient"):
        method(x[2:].clone().requires_grad_())
    np.testing.assert_array_equal(method(x.clone()[2:]), expected)
