"""Fake quantisation against PyTorch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

quick = settings(max_examples=30, deadline=None)
RANGES = st.sampled_from([(-128, 127), (0, 255), (-8, 7)])


@quick
@given(RANGES, st.sampled_from([0.1, 0.03, 2.0]), st.integers(0, 3), st.sampled_from([torch.float32, torch.float16]))
def test_per_tensor(limits, scale, zero_point, dtype):
    x = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 4).to(dtype).mT
    check("fake_quantize_per_tensor_affine_cachemask", x, scale, zero_point, *limits)
    scales, points = torch.tensor([scale]), torch.tensor([zero_point], dtype=torch.int32)
    for enabled in (0, 1):
        switch = torch.tensor([enabled])
        name = "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
        check(name, x, scales, points, switch, *limits)


@quick
@given(RANGES, st.integers(0, 2), st.sampled_from([torch.float32, torch.float16]))
def test_per_channel(limits, axis, dtype):
    x = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    channels = x.shape[axis]
    points = torch.arange(channels, dtype=torch.int32)
    check("fake_quantize_per_channel_affine_cachemask", x, torch.rand(channels) + 0.05, points, axis, *limits)


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match="expected `quant_min` up to `quant_max`, got 1 and 0"):
        find_kernel("aten::fake_quantize_per_tensor_affine_cachemask")(numpy.zeros(2, "f"), 1.0, 0, 1, 0)
    with pytest.raises(InvalidArgumentError, match="expected 2 scales and zero points"):
        find_kernel("aten::fake_quantize_per_channel_affine_cachemask")(
            numpy.zeros(2, "f"), numpy.ones(3), numpy.zeros(3), 0, 0, 255
        )
