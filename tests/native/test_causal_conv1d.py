"""The ragged causal convolution on the CPU against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import shim
from tests.native.shim import I32, Opt, ShimError, call
from tests.native.state_batches import TOLERANCE, conv_batch
from untorch.ops.causal_conv1d import causal_conv1d


def ours(given: dict[str, Any]) -> torch.Tensor:
    kinds = {"bias": Opt, "silu": lambda value: I32(int(value))}
    arguments = (kinds.get(name, lambda value: value)(value) for name, value in given.items())
    out: torch.Tensor = call("aoti_torch_cpu_causal_conv1d", *arguments, returns=1)
    return out


def verify(given: dict[str, Any]) -> None:
    plain, reference = (dict(given, states=given["states"].clone()) for _ in range(2))
    got, expected = ours(plain), causal_conv1d(**reference)
    tolerance = TOLERANCE[given["x"].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(plain["states"], reference["states"])


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(0, 70))
        lengths.append((tokens, tokens + draw(st.sampled_from([0, 0, 1, 100]))))
    made = conv_batch(
        lengths, draw(st.sampled_from([1, 20, 64, 100, 200])), draw(st.sampled_from([1, 2, 3, 4, 7])),
        draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)), draw(st.sampled_from([0, 5, 64])),
        draw(st.integers(0, 1000)), draw(st.booleans()),
    )  # fmt: skip
    made["silu"] = draw(st.booleans())
    if draw(st.booleans()):
        made["bias"] = None
    verify(made)


def test_strided_operands() -> None:
    made = conv_batch([(5, 20), (3, 3)], 40, 4)
    made["x"] = torch.randn(8, 100)[:, 30:70]
    verify(made)
    made["x"] = torch.randn(40, 8).T
    made["states"] = torch.randn(4, 200)[:, 1:]
    verify(made)


def test_threads_do_not_change_a_bit() -> None:
    made = conv_batch([(60, 60), (1, 40), (30, 90)], 700, 4)
    results = []
    for threads in (1, 2, 3, 5):
        shim.lib.utp_set_num_threads(threads)
        results.append(ours(dict(made, states=made["states"].clone())))
    shim.lib.utp_set_num_threads(2)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.ones(3, 8).double()}, "argument 'x' must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.ones(3, 8, 1)}, "argument 'x' must be [tokens, channels], got shape [3, 8, 1]"),
        ({"weight": torch.ones(7, 4)}, "argument 'weight' must be [8, width], got shape [7, 4]"),
        ({"weight": torch.ones(8, 4).half()}, "argument 'weight' must be float32, got float16"),
        ({"bias": torch.ones(7)}, "argument 'bias' must be float32 [8], got float32 [7]"),
        (
            {"states": torch.ones(3, 9).double()},
            "argument 'states' must be float32 [slots, elements], got float64 [3, 9]",
        ),
        ({"offset": 10}, "the rows of 'states' have 27 elements, and the layer needs 24 from 10 on"),
        ({"offset": -1}, "the rows of 'states' have 27 elements, and the layer needs 24 from -1 on"),
        ({"state_slots": torch.tensor([0])}, "argument 'state_slots' must be int32, got int64"),
        ({"seqlens_k": torch.tensor([3, 3], dtype=torch.int32)}, "argument 'seqlens_k' must have shape [1], got [2]"),
        ({"seqlens_k": torch.tensor([2], dtype=torch.int32)}, "argument 'seqlens_k' has a wrong value at 0: 2"),
        ({"state_slots": torch.tensor([3], dtype=torch.int32)}, "argument 'state_slots' has a wrong value at 0: 3"),
        ({"state_slots": torch.tensor([-2], dtype=torch.int32)}, "argument 'state_slots' has a wrong value at 0: -2"),
        (
            {"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)},
            "argument 'cu_seqlens_q' has a wrong value at 1: 4",
        ),
    ],
)
def test_errors(change: dict[str, Any], text: str) -> None:
    made = {**conv_batch([(3, 5)], 8, 4), **change}
    with pytest.raises(ShimError) as caught:
        ours(made)
    assert str(caught.value) == f"causal_conv1d: {text}"
