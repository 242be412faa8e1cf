"""The recurrent layer shim against PyTorch's eager operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import shim
from tests.native.shim import Opt, ShimError, call

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


CELLS = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] as [ceil(n/16), k, 16]; bfloat16 as [ceil(n/16), ceil(k/2), 16, 2]."""
    n, k = weight.shape
    each = 2 if weight.dtype == torch.bfloat16 else 1
    padded = torch.zeros((n + 15) // 16 * 16, -(-k // each) * each, dtype=weight.dtype)
    padded[:n, :k] = weight
    columns = (padded.shape[1] // 2, 2) if each == 2 else (k,)
    return padded.view(padded.shape[0] // 16, 16, *columns).transpose(1, 2).contiguous()


def module_of(cell: str, inputs: int, hidden: int, bias: bool) -> torch.nn.RNNBase:
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    options = {} if cell in kinds else {"nonlinearity": cell}
    return kinds.get(cell, torch.nn.RNN)(inputs, hidden, bias=bias, bidirectional=True, **options)  # type: ignore[no-any-return]


def recurrent(
    module: torch.nn.RNNBase, cell: str, x: torch.Tensor, states: list[torch.Tensor], lengths: torch.Tensor | None,
    reverse: bool, half: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """One direction of a module by the shim; ``half``: the weights of the hidden state are bfloat16."""
    suffix = "l0_reverse" if reverse else "l0"
    biases = [getattr(module, f"bias_{part}_{suffix}").detach() if module.bias else None for part in ("ih", "hh")]
    weights = [getattr(module, f"weight_{part}_{suffix}").detach() for part in ("ih", "hh")]
    weights = [pack(weights[0]), pack(weights[1].bfloat16() if half else weights[1])]
    c = states[1] if len(states) > 1 else None
    out: tuple[torch.Tensor, ...] = call(
        "aoti_torch_cpu_recurrent_layer", x, *weights, Opt(biases[0]), Opt(biases[1]), states[0], Opt(c), Opt(lengths),
        cell, reverse, returns=3,
    )  # fmt: skip
    return out


@settings(max_examples=80, deadline=None)
@given(
    cell=st.sampled_from(list(CELLS)), steps=st.integers(1, 7), batch=st.integers(1, 5), inputs=st.integers(1, 20),
    hidden=st.sampled_from([1, 3, 7, 16, 20, 32, 48, 144]), bias=st.booleans(), ragged=st.booleans(),
    half=st.booleans(),
)  # fmt: skip
def test_recurrent_layers_match_eager(
    cell: str, steps: int, batch: int, inputs: int, hidden: int, bias: bool, ragged: bool, half: bool
) -> None:
    module = module_of(cell, inputs, hidden, bias).eval()
    if half:  # computed in float32, as the shim does
        for weight in (module.weight_hh_l0, module.weight_hh_l0_reverse):
            weight.data = weight.data.bfloat16().float()
    x = torch.randn(steps, batch, inputs)
    lengths = torch.randint(1, steps + 1, (batch,)) if ragged else None
    states = [torch.randn(2, batch, hidden) for _ in range(2 if cell == "lstm" else 1)]
    given = tuple(states) if cell == "lstm" else states[0]
    with torch.no_grad():
        if lengths is None:
            expected, last = module(x, given)
        else:
            packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            out, last = module(packed, given)
            expected, _ = torch.nn.utils.rnn.pad_packed_sequence(out, total_length=steps)
    for direction in range(2):
        got, *ends = recurrent(module, cell, x, [state[direction] for state in states], lengths, direction == 1, half)
        torch.testing.assert_close(got, expected[..., direction * hidden :][..., :hidden], rtol=1e-5, atol=1e-5)
        for a, b in zip(ends, last if cell == "lstm" else (last,), strict=False):
            torch.testing.assert_close(a, b[direction], rtol=1e-5, atol=1e-5)
        assert cell == "lstm" or ends[1].shape == (0,)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_threads_do_not_change_a_recurrent_layer(batch: int) -> None:
    for cell in CELLS:
        module = module_of(cell, 40, 336, True).eval()
        x, states = torch.randn(9, batch, 40), [torch.randn(batch, 336) for _ in range(2 if cell == "lstm" else 1)]
        results = []
        for threads in (1, 2, 3, 5):
            shim.lib.utp_set_num_threads(threads)
            lengths = torch.tensor([9, 3, 1, 6])[:batch]
            results.append(recurrent(module, cell, x, states, lengths, False, half=batch == 2))
        shim.lib.utp_set_num_threads(2)
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_recurrent_layer_without_steps_or_rows(steps: int) -> None:
    module = module_of("gru", 3, 16, True)
    out, h, _ = recurrent(module, "gru", torch.randn(steps, 0, 3), [torch.randn(0, 16)], None, False)
    assert out.shape == (steps, 0, 16) and h.shape == (0, 16)
    state = torch.randn(2, 16)
    out, h, _ = recurrent(module, "gru", torch.randn(0, 2, 3), [state], None, False)
    assert out.shape == (0, 2, 16) and torch.equal(h, state)


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (8, "mgu", "cell 'mgu' is not supported, expected tanh, relu, lstm or gru"),
        (0, torch.ones(4, 5), "argument 'input' must be [steps, batch, inputs], got shape [4, 5]"),
        (5, torch.ones(7), "argument 'hx' must be [batch, hidden], got shape [7]"),
        (6, Opt(torch.ones(3, 7)), "argument 'cx' is for an LSTM only"),
        (0, torch.ones(4, 3, 5).half(), "argument 'input' must be float32, got float16"),
        (1, torch.ones(2, 4, 16), "argument 'w_input' must have shape [2, 5, 16], got [2, 4, 16]"),
        (2, torch.ones(2, 7, 16).half(), "argument 'w_hidden' must be float32 or bfloat16, got float16"),
        (2, torch.ones(2, 7, 16).bfloat16(), "argument 'w_hidden' must have shape [2, 4, 16, 2], got [2, 7, 16]"),
        (4, Opt(torch.ones(20)), "argument 'bias_hidden' must have shape [21], got [20]"),
        (7, Opt(torch.ones(3)), "argument 'lengths' must be int64, got float32"),
        (5, torch.ones(2, 7), "argument 'hx' must have shape [3, 7], got [2, 7]"),
    ],
)
def test_recurrent_layer_errors(index: int, value: Any, text: str) -> None:
    arguments: list[Any] = [
        torch.ones(4, 3, 5), torch.ones(2, 5, 16), torch.ones(2, 7, 16), Opt(None), Opt(None), torch.ones(3, 7),
        Opt(None), Opt(None), "gru", False,
    ]  # fmt: skip
    arguments[index] = value
    with pytest.raises(ShimError) as caught:
        call("aoti_torch_cpu_recurrent_layer", *arguments, returns=3)
    assert str(caught.value) == f"recurrent_layer: {text}"
