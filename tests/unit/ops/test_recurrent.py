"""untorch::recurrent_layer and untorch::recurrent: the references against PyTorch's modules, and error texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from untorch.ops.packed_linear import pack_weight
from untorch.ops.recurrent import CELLS, MODULE_OPERATOR, OPERATOR, recurrent, recurrent_layer

MODULES: dict[str, Any] = {
    "tanh": lambda **options: nn.RNN(5, 7, **options),
    "relu": lambda **options: nn.RNN(5, 7, nonlinearity="relu", **options),
    "lstm": lambda **options: nn.LSTM(5, 7, **options),
    "gru": lambda **options: nn.GRU(5, 7, **options),
}


def arguments(cell: str, lengths: torch.Tensor | None = None, biases: bool = True) -> list[Any]:
    gates = CELLS[cell] * 7
    return [
        torch.randn(4, 3, 5), pack_weight(torch.randn(gates, 5)), pack_weight(torch.randn(gates, 7)),
        torch.randn(gates) if biases else None, torch.randn(gates) if biases else None, torch.randn(3, 7),
        torch.randn(3, 7) if cell == "lstm" else None, lengths, cell, False,
    ]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("layers", "both", "bias"), [(1, False, True), (2, True, True), (2, False, False)])
@pytest.mark.parametrize("ragged", [False, True])
def test_modules(cell: str, layers: int, both: bool, bias: bool, ragged: bool) -> None:
    module = MODULES[cell](num_layers=layers, bidirectional=both, bias=bias).eval()
    x, lengths = torch.randn(6, 3, 5), torch.tensor([6, 2, 4]) if ragged else torch.tensor([6, 6, 6])
    states = [torch.randn(layers * (2 if both else 1), 3, 7) for _ in range(2 if cell == "lstm" else 1)]
    with torch.no_grad():
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, last = module(packed, tuple(states) if cell == "lstm" else states[0])
        expected, _ = nn.utils.rnn.pad_packed_sequence(out)
        got, *ends = recurrent(x, states, list(module._flat_weights), lengths, cell, bias, layers, both)
    torch.testing.assert_close(got, expected)
    for a, b in zip(ends, last if cell == "lstm" else (last,), strict=False):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("ragged", [False, True])
def test_opcheck(cell: str, ragged: bool) -> None:
    lengths = torch.tensor([4, 1, 2]) if ragged else None
    torch.library.opcheck(OPERATOR, tuple(arguments(cell, lengths, biases=ragged)))


@pytest.mark.parametrize("cell", CELLS)
def test_bfloat16_weights_of_the_hidden_state(cell: str) -> None:
    given = arguments(cell)
    rounded = torch.randn(CELLS[cell] * 7, 7).bfloat16()
    given[2] = pack_weight(rounded)
    got = recurrent_layer(*given)
    given[2] = pack_weight(rounded.float())
    for a, b in zip(got, recurrent_layer(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    given[2] = pack_weight(rounded)
    torch.library.opcheck(OPERATOR, tuple(given))


def test_opcheck_of_a_module() -> None:
    module = nn.GRU(5, 7, num_layers=2).requires_grad_(False)
    arguments = (torch.randn(4, 3, 5), [torch.randn(2, 3, 7)], list(module._flat_weights), torch.tensor([4, 1, 2]))
    torch.library.opcheck(MODULE_OPERATOR, (*arguments, "gru", True, 2, False))


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (8, "mgu", "cell: expected one of tanh, relu, lstm, gru, got 'mgu'"),
        (0, torch.randn(4, 5), r"expected input \[steps, batch, inputs\] and hx \[batch, hidden\], got \(4, 5\)"),
        (6, torch.randn(3, 7), "cx: is for an LSTM only"),
        (1, torch.randn(2, 4, 16), r"w_input: expected the shape \(2, 5, 16\), got \(2, 4, 16\)"),
        (2, torch.randn(2, 7, 16).half(), r"w_hidden: expected torch.float32 or torch.bfloat16, got torch.float16"),
        (2, torch.randn(2, 7, 16).bfloat16(), r"w_hidden: expected the shape \(2, 4, 16, 2\), got \(2, 7, 16\)"),
        (3, torch.randn(20), r"bias_input: expected the shape \(21,\), got \(20,\)"),
        (5, torch.randn(3, 7).double(), "hx: expected torch.float32, got torch.float64"),
        (7, torch.ones(3), "lengths: expected torch.int64, got torch.float32"),
    ],
)
def test_errors(index: int, value: Any, text: str) -> None:
    given = arguments("gru")
    given[index] = value
    with pytest.raises((ValueError, RuntimeError), match=f"recurrent_layer: {text}"):
        recurrent_layer(*given)


def test_an_lstm_needs_its_cell_state() -> None:
    given = arguments("lstm")
    given[6] = None
    with pytest.raises((ValueError, RuntimeError), match="recurrent_layer: cx: is missing"):
        recurrent_layer(*given)
