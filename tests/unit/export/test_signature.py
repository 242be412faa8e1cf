"""Tests of the descriptions of inputs and outputs, and of size expressions."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod

from untorch.export.mutations import Mutations, find_mutations
from untorch.export.signature import describe_inputs, describe_outputs, to_rpn
from untorch.runtime.errors import UnsupportedError


def evaluate(rpn: list[int | str], symbols: dict[str, int]) -> int:
    """The loader's rule: operators take the two values below them."""
    stack: list[int] = []
    operators = {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
        "%": lambda a, b: a % b, "min": min, "max": max,
    }  # fmt: skip
    for item in rpn:
        if isinstance(item, int):
            stack.append(item)
        elif item in operators:
            b, a = stack.pop(), stack.pop()
            stack.append(operators[item](a, b))
        else:
            stack.append(symbols[item])
    (value,) = stack
    return value


@given(st.integers(1, 50), st.integers(1, 50))
@settings(max_examples=20, deadline=None)
def test_rpn(a: int, b: int) -> None:
    s, t = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("s1", integer=True, positive=True)
    for expression, expected in (
        (2 * s + 3 * t - 1, 2 * a + 3 * b - 1),
        (FloorDiv(s + 7, 3) * t, (a + 7) // 3 * b),
        (Mod(s, 5), a % 5),
        (Max(s, t), max(a, b)),
        (Min(s, 32), min(a, 32)),
        (s**2 * t, a * a * b),
        (CeilDiv(s, 4), -(-a // 4)),
    ):
        rpn = to_rpn(expression)
        assert rpn is not None
        assert evaluate(rpn, {"s0": a, "s1": b}) == expected, expression


def test_unknown_expressions_have_no_rpn() -> None:
    assert to_rpn(sympy.sin(sympy.Symbol("s0"))) is None
    assert to_rpn(sympy.Symbol("s0") ** -1) is None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor, batch: dict[str, torch.Tensor], flag: bool, *, scale: torch.Tensor) -> object:
        self.state[1:2].add_(1)
        batch["mask"].mul_(2)
        y = torch.cat([x, x])[:, ::2] * scale
        return {"y": y, "none": None, "pair": (y.sum(), batch["ids"]), "size": y.shape[0]}


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    n = torch.export.Dim("n", min=2, max=9)
    batch = {"ids": torch.ones(2, 3, dtype=torch.int64), "mask": torch.ones(3)}
    shapes = {"x": {0: n}, "batch": {"ids": None, "mask": None}, "flag": None, "scale": None}
    args = (torch.randn(8, 4).t(), batch, True)
    return torch.export.export(Model(), args, {"scale": torch.ones(())}, dynamic_shapes=shapes)


def test_inputs(program: torch.export.ExportedProgram) -> None:
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    mutations = find_mutations(module.graph)
    assert mutations.attributes == {"state"}
    x, ids, mask, flag, scale = describe_inputs(program, None, mutations)
    assert (x["name"], x["dtype"], x["contiguous"]) == ("x", "float32", False)
    symbol = x["shape"][0]
    assert (symbol["min"], symbol["max"], x["shape"][1]) == (2, 9, 8)
    assert (ids["name"], ids["dtype"], ids["shape"], ids["strides"]) == ("batch['ids']", "int64", [2, 3], [3, 1])
    assert mask["mutated"] is True
    assert "mutated" not in ids
    assert flag == {"name": "flag", "constant": True}
    assert (scale["name"], scale["shape"]) == ("scale", [])


def test_outputs(program: torch.export.ExportedProgram) -> None:
    y, none, total, ids, size = describe_outputs(program)
    assert y is not None
    assert y["name"] == "y"
    assert y["shape"][0]["rpn"][0] == 2
    assert none is None
    assert total == {"name": "pair[0]", "dtype": "float32", "shape": []}
    assert ids is not None
    assert ids["name"] == "pair[1]"
    assert size == {"name": "size", "dtype": "int64", "shape": [], "scalar": True}


def test_a_single_output_and_positions() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return (x * 2, x * 3) if x.dim() == 1 else x * 2

    first = describe_outputs(torch.export.export(Two(), (torch.ones(2),)))
    assert [o["name"] for o in first if o] == ["output_0", "output_1"]
    assert describe_outputs(torch.export.export(Two(), (torch.ones(2, 2),)))[0]["name"] == "output"  # type: ignore[index]


def test_dynamic_numbers() -> None:
    class Number(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n

    shapes = {"x": None, "n": torch.export.Dim.DYNAMIC}
    program = torch.export.export(Number(), (torch.ones(2), 3), dynamic_shapes=shapes)
    mutations = Mutations(frozenset(), frozenset())
    with pytest.raises(
        UnsupportedError, match="input n: a number that may change is not supported on cuda: pass it as"
    ):
        describe_inputs(program, None, mutations, "cuda")
    number = describe_inputs(program, None, mutations)[1]
    assert (number["name"], number["dtype"], number["shape"], number["scalar"]) == ("n", "int64", [], True)
    assert number["value"]["symbol"].startswith("s")
