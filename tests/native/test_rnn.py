"""The recurrent layer shim against PyTorch's eager operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import ShimError, call

LSTM = 2


def lstm_arguments(
    steps: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype = torch.float32, state_dim: int = 2
) -> list[torch.Tensor]:
    shapes = [(steps, batch, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    states = [(1,) * (state_dim - 2) + (batch, hidden)] * 2
    return [torch.randn(shape).to(dtype) for shape in [*shapes, *states]]


def layer(tensors: list[torch.Tensor], reverse: bool, *rest: Any) -> tuple[torch.Tensor, ...]:
    out: tuple[torch.Tensor, ...] = call("aoti_torch_cpu_mkldnn_rnn_layer", *tensors, reverse, [], *rest, returns=4)
    return out


def reference(tensors: list[torch.Tensor], reverse: bool, biases: bool = True) -> list[torch.Tensor]:
    x, w0, w1, b0, b1, h, c = tensors
    outputs = []
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        gates = x[t] @ w0.T + h @ w1.T + (b0 + b1 if biases else 0)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return [torch.stack(outputs[::-1] if reverse else outputs), h, c]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 6), batch=st.integers(1, 4), inputs=st.integers(1, 9), hidden=st.integers(1, 20),
    reverse=st.booleans(), biases=st.booleans(), state_dim=st.sampled_from([2, 3]), flags=st.booleans(),
)  # fmt: skip
def test_lstm_matches_eager(
    steps: int, batch: int, inputs: int, hidden: int, reverse: bool, biases: bool, state_dim: int, flags: bool
) -> None:
    tensors = lstm_arguments(steps, batch, inputs, hidden, state_dim=state_dim)
    rest = (LSTM, hidden, 1 + flags, biases, flags, flags, False)
    want = torch.ops.aten.mkldnn_rnn_layer(*tensors, reverse, [], *rest)
    got = layer(tensors, reverse, *rest)
    for g, w in zip(got[:3], want[:3], strict=True):
        assert g.shape == w.shape
        assert g.stride() == w.stride()
        torch.testing.assert_close(g, w, rtol=1e-5, atol=2e-6)
    assert got[3].dtype == torch.uint8


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_other_dtypes(dtype: torch.dtype, tolerance: float, reverse: bool) -> None:
    tensors = [t * 0.5 for t in lstm_arguments(5, 3, 6, 10, dtype)]
    want = reference([t.double() for t in tensors], reverse)
    got = layer(tensors, reverse, LSTM, 10, 1, True, False, False, False)
    for g, w in zip(got[:3], want, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)


def test_large_and_strided() -> None:
    tensors = [t * 0.1 for t in lstm_arguments(8, 16, 96, 128)]
    tensors[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    tensors[1] = tensors[1].T.contiguous().T
    rest = (LSTM, 128, 1, True, False, False, False)
    want = reference(tensors, False)  # eager itself is wrong for an input that is not time first in memory
    for g, w in zip(layer(tensors, False, *rest)[:3], want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=2e-6)


def test_saturated_gates_and_nan() -> None:
    tensors = lstm_arguments(2, 2, 3, 4)
    tensors[0] *= 1e4
    tensors[6][0, 0] = torch.nan
    want = torch.ops.aten.mkldnn_rnn_layer(*tensors, False, [], LSTM, 4, 1, True, False, False, False)
    got = layer(tensors, False, LSTM, 4, 1, True, False, False, False)
    assert got[0][0, 0, 0].isnan()
    torch.testing.assert_close(got[0][:, 1], want[0][:, 1], rtol=1e-5, atol=2e-6)


def test_inputs_stay_as_they_are() -> None:
    tensors = lstm_arguments(3, 2, 3, 4)
    before = [t.clone() for t in tensors]
    layer(tensors, False, LSTM, 4, 1, True, False, False, False)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_no_steps_and_empty_batch() -> None:
    tensors = lstm_arguments(0, 2, 3, 4)
    out, h, c, _ = layer(tensors, False, LSTM, 4, 1, True, False, False, False)
    assert out.shape == (0, 2, 4)
    assert torch.equal(h, tensors[5])
    assert torch.equal(c, tensors[6])
    assert layer(lstm_arguments(3, 0, 3, 4), False, LSTM, 4, 1, True, False, False, False)[0].shape == (3, 0, 4)


def test_errors() -> None:
    tensors = lstm_arguments(3, 2, 5, 4)
    flags = (1, True, False, False, False)

    def message(values: list[torch.Tensor], *rest: Any, sizes: list[int] | None = None) -> str:
        with pytest.raises(ShimError) as failure:
            call("aoti_torch_cpu_mkldnn_rnn_layer", *values, False, sizes or [], *rest, returns=4)
        return str(failure.value)

    assert (
        message(tensors, 3, 4, *flags)
        == "mkldnn_rnn_layer: argument 'mode' must be 2 (LSTM), got 3; PyTorch's operator serves no other either"
    )
    assert (
        message(tensors, LSTM, 4, *flags, sizes=[2, 1])
        == "mkldnn_rnn_layer: packed sequences (batch_sizes) are not supported; pad the sequences"
    )
    assert (
        message([tensors[0][0], *tensors[1:]], LSTM, 4, *flags)
        == "mkldnn_rnn_layer: argument 'input' must be [time, batch, features], got shape [2, 5]"
    )
    assert (
        message(tensors, LSTM, 5, *flags) == "mkldnn_rnn_layer: argument 'weight0' must have shape [20, 5], got [16, 5]"
    )
    assert (
        message([*tensors[:5], tensors[5][:1], tensors[6]], LSTM, 4, *flags)
        == "mkldnn_rnn_layer: argument 'hx_' must hold [2, 4] values, got shape [1, 4]"
    )
    assert (
        message([*tensors[:6], tensors[6].double()], LSTM, 4, *flags)
        == "mkldnn_rnn_layer: argument 'cx_' must be float32 like 'input', got float64"
    )
    assert message(tensors, LSTM, 0, *flags) == "mkldnn_rnn_layer: argument 'hidden_size' must be positive, got 0"
    assert (
        message([tensors[0].int(), *tensors[1:]], LSTM, 4, *flags)
        == "mkldnn_rnn_layer: dtype int32 is not supported, expected float16, bfloat16, float32 or float64"
    )
