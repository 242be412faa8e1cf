"""Antialiased resizing against PyTorch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

quick = settings(max_examples=30, deadline=None)
SIZES, WIDTHS = st.integers(1, 12), st.integers(2, 12)
NAMES = st.sampled_from(["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"])


# PyTorch 2.13 repeats the first row when an image of one column is resized along its height, hence two columns.
@quick
@given(
    NAMES,
    SIZES,
    WIDTHS,
    SIZES,
    WIDTHS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_resize(name, h, w, target_h, target_w, align, channels_last, dtype):
    x = torch.randn(2, 3, h, w, dtype=dtype, generator=torch.Generator().manual_seed(h * w))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    check(name, x, [target_h, target_w], align)


@pytest.mark.parametrize("name", ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"])
def test_resize_with_scales(name):
    check(name, torch.randn(1, 2, 9, 7), [4, 3], False, 0.45, 0.5)


@pytest.mark.parametrize("name", ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"])
def test_resize_of_bytes_differs_by_one_at_most(name):
    x = torch.randint(0, 256, (1, 3, 17, 13), dtype=torch.uint8)
    actual = find_kernel(f"aten::{name}")(x.numpy(), [5, 20], False)
    expected = getattr(torch.ops.aten, name)(x, [5, 20], False).numpy()
    assert actual.dtype == numpy.uint8
    assert abs(actual.astype(int) - expected).max() <= 1


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match=r"expected 4 dimensions .* got the shape \(3, 3\) and \[2, 2\]"):
        find_kernel("aten::_upsample_bilinear2d_aa")(numpy.zeros((3, 3)), [2, 2], False)
