"""The ragged gated delta rule on the CPU against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import shim
from tests.native.shim import I32, Opt, ShimError, call
from tests.native.state_batches import TOLERANCE, channel_decays, delta_batch, without_beta
from untorch.ops.gated_delta_rule import gated_delta_rule


def ours(given: dict[str, Any]) -> torch.Tensor:
    kinds = {"beta": Opt, "l2norm": lambda value: I32(int(value))}
    arguments = (kinds.get(name, lambda value: value)(value) for name, value in given.items())
    out: torch.Tensor = call("aoti_torch_cpu_gated_delta_rule", *arguments, returns=1)
    return out


def verify(given: dict[str, Any]) -> None:
    plain, reference = (dict(given, states=given["states"].clone()) for _ in range(2))
    got, expected = ours(plain), gated_delta_rule(**reference)
    tolerance = TOLERANCE[given["v"].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(plain["states"], reference["states"], rtol=2e-5, atol=2e-5)
    held = given["state_slots"][(given["cu_seqlens_q"].diff() > 0) & (given["state_slots"] >= 0)].tolist()
    others = [slot for slot in range(len(given["states"])) if slot not in held]
    assert torch.equal(plain["states"][others], given["states"][others])


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(0, 40))
        lengths.append((tokens, tokens + draw(st.sampled_from([0, 0, 1, 100]))))
    heads_k = draw(st.sampled_from([1, 2, 3]))
    made = delta_batch(
        lengths, heads_k * draw(st.sampled_from([1, 2, 4])), heads_k, draw(st.sampled_from([1, 8, 19, 64])),
        draw(st.sampled_from([1, 8, 20, 32, 64, 67])), draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 5, 64])), draw(st.integers(0, 1000)), draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()):
        made = channel_decays(made)
    if draw(st.booleans()):
        made = without_beta(made)
    verify(made)


def test_a_long_prompt_in_pieces() -> None:
    """As a whole, and in pieces that find the state in the pool."""
    whole = delta_batch([(200, 200)], 4, 2, 64, 64)
    expected = ours(dict(whole, states=(states := whole["states"].clone())))
    pieces = dict(whole, states=whole["states"].clone())
    found, begin = [], 0
    for count in (70, 1, 1, 128):
        cut = {name: whole[name][begin : begin + count] for name in ("q", "k", "v", "g", "beta")}
        begin += count
        ends = torch.tensor([0, count], dtype=torch.int32)
        found.append(ours({**pieces, **cut, "cu_seqlens_q": ends, "seqlens_k": ends[1:] * 0 + begin}))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pieces["states"], states, rtol=1e-5, atol=1e-5)


def test_strided_operands() -> None:
    made = delta_batch([(5, 20), (3, 3)], 4, 2, 16, 16)
    packed = torch.randn(8, 128)
    made["q"], made["k"] = packed[:, :32].unflatten(1, (2, 16)), packed[:, 32:64].unflatten(1, (16, 2)).transpose(1, 2)
    made["v"], made["g"] = packed[:, 64:].unflatten(1, (4, 16)), made["g"].T.contiguous().T
    verify(made)


def test_threads_do_not_change_a_bit() -> None:
    made = delta_batch([(60, 60), (1, 40)], 3, 1, 32, 100)
    results = []
    for threads in (1, 2, 3, 5):
        shim.lib.utp_set_num_threads(threads)
        results.append(ours(dict(made, states=made["states"].clone())))
    shim.lib.utp_set_num_threads(2)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"v": torch.ones(3, 4, 8).double()}, "argument 'v' must be float32, bfloat16 or float16, got float64"),
        ({"v": torch.ones(3, 4)}, "argument 'v' must be [tokens, heads, width_v], got shape [3, 4]"),
        ({"q": torch.ones(3, 4)}, "argument 'q' must be [tokens, heads_k, width], got shape [3, 4]"),
        ({"q": torch.ones(3, 3, 8), "k": torch.ones(3, 3, 8)}, "4 heads do not divide into 3 key heads"),
        ({"k": torch.ones(3, 1, 8)}, "argument 'k' must have shape [3, 2, 8], got [3, 1, 8]"),
        ({"k": torch.ones(3, 2, 8).half()}, "argument 'k' must be float32, got float16"),
        ({"g": torch.ones(3, 4, 7)}, "argument 'g' must have shape [3, 4, 8], got [3, 4, 7]"),
        ({"beta": torch.ones(3, 4).half()}, "argument 'beta' must be float32, got float16"),
        ({"offset": 4}, "the rows of 'states' have 259 elements, and the layer needs 256 from 4 on"),
        ({"state_slots": torch.tensor([7], dtype=torch.int32)}, "argument 'state_slots' has a wrong value at 0: 7"),
    ],
)
def test_errors(change: dict[str, Any], text: str) -> None:
    made = {**delta_batch([(3, 5)], 4, 2, 8, 8), **change}
    with pytest.raises(ShimError) as caught:
        ours(made)
    assert str(caught.value) == f"gated_delta_rule: {text}"
