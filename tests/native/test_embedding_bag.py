"""The embedding_bag shims against PyTorch's eager operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import I32, Opt, ShimError, call

SUM, MEAN, MAX = 0, 1, 2
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_matches_eager(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    weight = torch.randn(rows, width).to(dtype)
    if draw(st.booleans()):
        weight = weight.T.contiguous().T
    count = draw(st.integers(0, 12))
    index_dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    indices = torch.tensor([draw(st.integers(0, rows - 1)) for _ in range(count)], dtype=index_dtype)
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=5)))
    include_last = draw(st.booleans())
    offsets = torch.tensor([0, *cuts, *([count] if include_last else [])], dtype=index_dtype)
    mode = draw(st.sampled_from([SUM, MEAN, MAX]))
    weights = torch.rand(count).to(dtype) if mode == SUM and draw(st.booleans()) else None
    padding = draw(st.sampled_from([-1, 0, rows - 1]))
    before, after = (weight, indices, offsets, False, mode, False), (include_last, padding)
    for name in ("_embedding_bag", "_embedding_bag_forward_only"):
        want = getattr(torch.ops.aten, name)(*before, weights, *after)
        got = call(f"aoti_torch_cpu_{name}", *before, Opt(weights), *after, returns=4)
        torch.testing.assert_close(got[0], want[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert got[0].stride() == want[0].stride()
        if name == "_embedding_bag":
            for g, w in zip(got[1:], want[1:], strict=True):
                assert g.shape == w.shape
                assert torch.equal(g, w)


def test_many_bags_and_the_deprecated_name() -> None:
    weight, indices = torch.randn(1000, 64), torch.randint(0, 1000, (5000,))
    offsets = torch.arange(0, 5000, 10)
    want = torch.ops.aten._embedding_bag(weight, indices, offsets)
    args = (weight, indices, offsets, I32(0), I32(SUM), I32(0))
    got = call("aoti_torch__embedding_bag", *args, None, I32(0), I32(-1), returns=4)
    torch.testing.assert_close(got[0], want[0])
    per_sample = torch.rand(5000)
    want = torch.ops.aten._embedding_bag(weight, indices, offsets, False, SUM, False, per_sample)
    got = call("aoti_torch__embedding_bag", *args, per_sample, I32(0), I32(-1), returns=4)
    torch.testing.assert_close(got[0], want[0])


W, IDS, OFFSETS = torch.zeros(4, 3), torch.tensor([1, 2, 3]), torch.tensor([0, 2])
ERRORS = {
    "weight": ((W[0], IDS, OFFSETS, SUM, None, False, -1), "argument 'weight' must be 2-D, got shape [3]"),
    "indices": ((W, IDS[None], OFFSETS, SUM, None, False, -1), "argument 'indices' must be 1-D, got shape [1, 3]"),
    "offsets": ((W, IDS, OFFSETS[None], SUM, None, False, -1), "argument 'offsets' must be 1-D, got shape [1, 2]"),
    "dtype": (
        (W, IDS.double(), OFFSETS, SUM, None, False, -1),
        "argument 'indices' must be int32 or int64, got float64",
    ),
    "mode": ((W, IDS, OFFSETS, 3, None, False, -1), "argument 'mode' must be 0 (sum), 1 (mean) or 2 (max), got 3"),
    "range": ((W, IDS + 1, OFFSETS, SUM, None, False, -1), "index 4 is outside of the table's 4 rows"),
    "first offset": ((W, IDS, OFFSETS + 1, SUM, None, False, -1), "argument 'offsets' must begin with 0, got 1"),
    "order": (
        (W, IDS, torch.tensor([0, 2, 1]), SUM, None, False, -1),
        "argument 'offsets' must not decrease, got 2 before 1",
    ),
    "beyond": ((W, IDS, torch.tensor([0, 5]), SUM, None, True, -1), "argument 'offsets' ends at 5, beyond 3 indices"),
    "no last": (
        (W, IDS, OFFSETS[:0], SUM, None, True, -1),
        "argument 'offsets' must hold at least one value with include_last_offset",
    ),
    "weights": (
        (W, IDS, OFFSETS, MEAN, torch.ones(3), False, -1),
        "argument 'per_sample_weights' goes with mode 0 (sum) only, got mode 1",
    ),
    "weights shape": (
        (W, IDS, OFFSETS, SUM, torch.ones(2), False, -1),
        "argument 'per_sample_weights' must have shape [3], got [2]",
    ),
    "weights dtype": (
        (W, IDS, OFFSETS, SUM, torch.ones(3).double(), False, -1),
        "argument 'per_sample_weights' must be float32 like weight, got float64",
    ),
    "padding": (
        (W, IDS, OFFSETS, SUM, None, False, 4),
        "argument 'padding_idx' must be inside of the table's 4 rows, got 4",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    (weight, indices, offsets, mode, weights, include_last, padding), text = ERRORS[case]
    args = (weight, indices, offsets, False, mode, False, Opt(weights), include_last, padding)
    with pytest.raises(ShimError) as failure:
        call("aoti_torch_cpu__embedding_bag", *args, returns=4)
    assert str(failure.value) == "_embedding_bag: " + text
