"""Packed sequences, complex numbers, masked softmax and convolution over time against PyTorch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

quick = settings(max_examples=25, deadline=None)


@quick
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.sampled_from([torch.float32, torch.int64])
)
def test_packed_sequences(lengths, batch_first, dtype):
    lengths = torch.tensor(sorted(lengths, reverse=True))
    shape = (len(lengths), 5, 2) if batch_first else (5, len(lengths), 2)
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    check("_pack_padded_sequence", values, lengths, batch_first)
    data, sizes = torch.ops.aten._pack_padded_sequence(values, lengths, batch_first)
    check("_pad_packed_sequence", data, sizes, batch_first, -1, 0)
    check("_pad_packed_sequence", data, sizes, batch_first, -1, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex(dtype):
    check("complex", torch.randn(2, 3, dtype=dtype), torch.randn(3, dtype=dtype))


@quick
@given(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(1, 5))
def test_masked_softmax(dtype, length):
    scores = torch.randn(2, 3, length, length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    mask = torch.rand(2, length) < 0.4
    mask[:, 0] = False
    check("_masked_softmax", scores, mask, 3, 1)
    check("_masked_softmax", scores, mask[0].expand(length, length).contiguous(), 3, 0)
    check("_masked_softmax", scores, mask[:, None, None, :].expand(scores.shape).contiguous(), 3, 2)


def test_masked_softmax_with_nothing_left():
    actual = find_kernel("aten::_masked_softmax")(numpy.ones((2, 2), "f"), numpy.ones((2, 2), "?"), 1, 2)
    assert actual.tolist() == [[0, 0], [0, 0]]


@quick
@given(st.integers(1, 4), st.integers(0, 2), st.sampled_from([torch.float32, torch.float64]))
def test_conv_tbc(width, pad, dtype):
    check(
        "conv_tbc",
        torch.randn(5, 2, 3, dtype=dtype),
        torch.randn(width, 3, 4, dtype=dtype),
        torch.randn(4, dtype=dtype),
        pad,
    )


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match=r"longest first, got \[1, 2\]"):
        find_kernel("aten::_pack_padded_sequence")(numpy.zeros((2, 2, 1)), numpy.array([1, 2]), True)
    with pytest.raises(InvalidArgumentError, match="`total_length`: expected at least 2, got 1"):
        find_kernel("aten::_pad_packed_sequence")(numpy.zeros((2, 1)), numpy.array([1, 1]), True, 0, 1)
    with pytest.raises(InvalidArgumentError, match="`mask_type`: expected 0, 1 or 2, got 3"):
        find_kernel("aten::_masked_softmax")(numpy.zeros((2, 2)), numpy.zeros((2, 2)), 1, 3)
    with pytest.raises(InvalidArgumentError, match="conv_tbc: the weight is 9 wide"):
        find_kernel("aten::conv_tbc")(numpy.zeros((5, 2, 3)), numpy.zeros((9, 3, 4)), numpy.zeros(4))
    with pytest.raises(InvalidArgumentError, match="conv_tbc: expected an input"):
        find_kernel("aten::conv_tbc")(numpy.zeros((5, 2, 3)), numpy.zeros((1, 2, 4)), numpy.zeros(4))
