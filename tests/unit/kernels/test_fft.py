"""The Fourier transforms against PyTorch, memory layout included."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

quick = settings(max_examples=40, deadline=None)


@st.composite
def transforms(draw, complex_input):
    """A tensor of some dtype and stride order, and the dimensions to transform."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    double = draw(st.booleans())
    dtype = {
        (True, True): torch.complex128,
        (True, False): torch.complex64,
        (False, True): torch.float64,
        (False, False): torch.float32,
    }[complex_input, double]
    order = draw(st.permutations(range(len(shape))))
    values = torch.randn([shape[axis] for axis in order], dtype=dtype, generator=torch.Generator().manual_seed(0))
    values = values.permute([order.index(axis) for axis in range(len(shape))])
    # Counted from the front: PyTorch's own operators crash on negative dimensions, which only its front end resolves.
    return values, draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]


@quick
@given(transforms(complex_input=True), st.integers(0, 2), st.booleans())
def test_complex_to_complex(case, normalization, forward):
    check("_fft_c2c", *case, normalization, forward)


@quick
@given(transforms(complex_input=False), st.integers(0, 2), st.booleans())
def test_real_to_complex(case, normalization, onesided):
    check("_fft_r2c", *case, normalization, onesided)


@quick
@given(transforms(complex_input=True), st.integers(0, 2), st.booleans())
def test_complex_to_real(case, normalization, odd):
    values, dims = case
    check("_fft_c2r", values, dims, normalization, max(2 * (values.shape[dims[-1]] - 1) + odd, 1))


def test_negative_dimensions():
    values = numpy.random.default_rng(0).random((2, 3, 4)) + 0j
    kernel = find_kernel("aten::_fft_c2c")
    numpy.testing.assert_array_equal(kernel(values, [-1, -3], 1, True), kernel(values, [2, 0], 1, True))


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match="_fft_c2c: argument `normalization`: expected 0, 1 or 2, got 3"):
        find_kernel("aten::_fft_c2c")(numpy.zeros(2, "F"), [0], 3, True)
    with pytest.raises(InvalidArgumentError, match=r"expected every dimension once, got \[0, -1\]"):
        find_kernel("aten::_fft_r2c")(numpy.zeros(2, "f"), [0, -1], 0, True)
    with pytest.raises(InvalidArgumentError, match="a positive `last_dim_size`"):
        find_kernel("aten::_fft_c2r")(numpy.zeros(2, "F"), [0], 0, 0)
    with pytest.raises(InvalidArgumentError, match="has no elements"):
        find_kernel("aten::_fft_r2c")(numpy.zeros((2, 0), "f"), [1], 0, True)
