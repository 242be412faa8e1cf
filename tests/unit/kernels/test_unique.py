"""Distinct values and slices against PyTorch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
FLAGS = st.booleans()
quick = settings(max_examples=40, deadline=None)


@st.composite
def tensors(draw, min_dims=0):
    shape = draw(st.lists(st.integers(0, 4), min_size=min_dims, max_size=3))
    values = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    return values.to(draw(DTYPES)).movedim(0, -1) if shape and draw(FLAGS) else values.to(draw(DTYPES))


@quick
@given(tensors(), FLAGS, FLAGS)
def test_unique(x, inverse, counts):
    check("_unique2", x, True, inverse, counts)
    check("_unique", x, True, True)


@quick
@given(tensors(), FLAGS, FLAGS)
def test_unique_consecutive(x, inverse, counts):
    check("unique_consecutive", x, inverse, counts)


@quick
@given(tensors(min_dims=1), FLAGS, FLAGS, st.integers(-1, 0))
def test_unique_slices(x, inverse, counts, dim):
    if x.numel() == 0:
        return
    check("unique_dim", x, dim, True, inverse, counts)
    check("unique_dim_consecutive", x, dim, inverse, counts)
    check("unique_consecutive", x, inverse, counts, dim)


def test_every_nan_is_distinct():
    x = torch.tensor([1.0, float("nan"), 1.0, float("nan")])
    check("_unique2", x, True, False, True)
    check("unique_consecutive", x, False, True)
