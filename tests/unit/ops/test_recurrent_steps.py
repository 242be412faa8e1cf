"""untorch::recurrent_steps: the reference against PyTorch's modules, and error texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.ops.test_recurrent import MODULES
from untorch.ops.recurrent import CELLS
from untorch.ops.recurrent_steps import OPERATOR, recurrent_steps


def arguments(cell: str, directions: int = 1, lengths: torch.Tensor | None = None, biases: bool = True) -> list[Any]:
    gates = CELLS[cell] * 7
    return [
        torch.randn(4, 3, directions * gates), torch.randn(directions, gates, 7),
        torch.randn(directions, gates) if biases else None, torch.randn(directions, 3, 7),
        torch.randn(directions, 3, 7) if cell == "lstm" else None, lengths, cell,
    ]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("both", "bias"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("ragged", [False, True])
def test_modules(cell: str, both: bool, bias: bool, ragged: bool) -> None:
    module, directions = MODULES[cell](bidirectional=both, bias=bias).eval(), 2 if both else 1
    x, lengths = torch.randn(6, 3, 5), torch.tensor([6, 2, 4]) if ragged else torch.tensor([6, 6, 6])
    states = [torch.randn(directions, 3, 7) for _ in range(2 if cell == "lstm" else 1)]
    w_input, w_hidden, *biases = (
        torch.stack(parts) for parts in zip(*module.all_weights, strict=True)
    )  # of both directions
    with torch.no_grad():
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, last = module(packed, tuple(states) if cell == "lstm" else states[0])
        expected, _ = nn.utils.rnn.pad_packed_sequence(out)
        gates = nn.functional.linear(x, w_input.flatten(0, 1), biases[0].flatten() if bias else None)
        given = (gates, w_hidden, biases[1] if bias else None, states[0], states[1] if cell == "lstm" else None)
        got, *ends = recurrent_steps(*given, lengths if ragged else None, cell)
    torch.testing.assert_close(got, expected)
    for a, b in zip(ends, last if cell == "lstm" else (last,), strict=False):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("directions", "ragged"), [(1, False), (2, True)])
def test_opcheck(cell: str, directions: int, ragged: bool) -> None:
    lengths = torch.tensor([4, 1, 2]) if ragged else None
    torch.library.opcheck(OPERATOR, tuple(arguments(cell, directions, lengths, biases=ragged)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_float32_between_steps(dtype: torch.dtype) -> None:
    given = [value.to(dtype) if isinstance(value, torch.Tensor) else value for value in arguments("lstm", 2)]
    wide = [value.float() if isinstance(value, torch.Tensor) else value for value in given]
    for got, expected in zip(recurrent_steps(*given), recurrent_steps(*wide), strict=True):
        assert torch.equal(got, expected.to(dtype))
    torch.library.opcheck(OPERATOR, tuple(given))


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (6, "mgu", "cell: expected one of tanh, relu, lstm, gru, got 'mgu'"),
        (
            0,
            torch.randn(4, 21),
            r"expected input_gates \[steps, batch, directions \* gates \* hidden\] and hx \[directions, batch, hidden\] "
            r"with 1 or 2 directions, got \(4, 21\) and \(1, 3, 7\)",
        ),
        (0, torch.randn(4, 3, 21).double(), "input_gates: expected float32, bfloat16 or float16, got torch.float64"),
        (0, torch.randn(4, 3, 20), r"input_gates: expected the shape \(4, 3, 21\), got \(4, 3, 20\)"),
        (1, torch.randn(21, 7), r"w_hidden: expected the shape \(1, 21, 7\), got \(21, 7\)"),
        (1, torch.randn(1, 21, 7).half(), "w_hidden: expected torch.float32, got torch.float16"),
        (2, torch.randn(1, 20), r"bias_hidden: expected the shape \(1, 21\), got \(1, 20\)"),
        (3, torch.randn(3, 3, 7), r"got \(4, 3, 21\) and \(3, 3, 7\)"),
        (4, torch.randn(1, 3, 7), "cx: is for an LSTM only"),
        (5, torch.ones(3), "lengths: expected torch.int64, got torch.float32"),
    ],
)
def test_errors(index: int, value: Any, text: str) -> None:
    given = arguments("gru")
    given[index] = value
    with pytest.raises((ValueError, RuntimeError), match=f"recurrent_steps: .*{text}"):
        recurrent_steps(*given)


def test_an_lstm_needs_its_cell_state() -> None:
    given = arguments("lstm")
    given[4] = None
    with pytest.raises((ValueError, RuntimeError), match="recurrent_steps: cx: is missing"):
        recurrent_steps(*given)
