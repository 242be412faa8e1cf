"""Order statistics, histograms and counts against PyTorch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import as_list, check, check_close, check_form, operator, run_both

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
quick = settings(max_examples=40, deadline=None)


@st.composite
def tensors(draw, dtypes=(*FLOATS, torch.int64, torch.int32, torch.uint8), nan=True):
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(0, 6, shape, generator=generator).to(draw(st.sampled_from(dtypes)))
    if nan and values.is_floating_point() and draw(st.booleans()):
        values[torch.rand(shape, generator=generator) < 0.3] = float("nan")
    return values.movedim(0, -1) if shape and draw(st.booleans()) else values


def check_selection(name, x, *args):
    """Ties leave the index open: the value at our index must be our value, and the values must be PyTorch's."""
    dim, keepdim = args[-2:]
    (values, indices), (expected, _) = run_both(name, x, *args)
    check_close(values, expected)
    picked = indices if keepdim or x.ndim == 0 else numpy.expand_dims(indices, dim)
    found = torch.gather(x, dim, torch.from_numpy(numpy.array(picked)))
    check_close(values, found if keepdim or x.ndim == 0 else found.squeeze(dim))


@quick
@given(tensors(), st.integers(-1, 0), st.booleans())
def test_selection_along_a_dimension(x, dim, keepdim):
    check_selection("median.dim", x, dim, keepdim)
    check_selection("nanmedian.dim", x, dim, keepdim)
    length = x.shape[dim] if x.ndim else 1
    for k in {1, length}:
        check_selection("kthvalue", x, k, dim, keepdim)


@quick
@given(tensors(nan=False), st.integers(-1, 0), st.booleans())
def test_mode(x, dim, keepdim):
    check_selection("mode", x, dim, keepdim)


@quick
@given(tensors())
def test_median_of_all(x):
    check("median", x)
    check("nanmedian", x)


def test_median_of_nothing():
    check("median", torch.zeros(0))
    check("nanmedian", torch.zeros(0))
    with pytest.raises(InvalidArgumentError, match=r"median: dimension 1 of the shape \(2, 0\) has no elements"):
        find_kernel("aten::median.dim")(numpy.zeros((2, 0)), 1)
    with pytest.raises(InvalidArgumentError, match="kthvalue: argument `k`: expected 1 to 3, got 4"):
        find_kernel("aten::kthvalue")(numpy.zeros(3), 4)


@quick
@given(st.sampled_from([torch.float32, torch.float64]), st.integers(0, 40), st.integers(1, 7))
def test_histc(dtype, count, bins):
    x = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count))
    check("histc", x, bins)
    check("histc", x, bins, -1.0, 0.5)
    check("histc", torch.full((4,), 2.0, dtype=dtype), bins)


@quick
@given(st.sampled_from([torch.float32, torch.float64]), st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_histogram(dtype, count, bins, density):
    x = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count))
    weight = torch.rand(count, dtype=dtype)
    check("histogram.bin_ct", x, bins, density=density)
    check("histogram.bin_ct", x, bins, range=[-3.0, 3.0], weight=weight, density=density)
    edges = torch.linspace(-3, 3, bins + 1, dtype=dtype) ** 3
    check("histogram.bins_tensor", x, edges, weight=weight, density=density)


@quick
@given(st.integers(1, 30), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_histogram_of_points(count, bins, density):
    x = torch.randn(count, len(bins), generator=torch.Generator().manual_seed(count))
    check("_histogramdd_bin_edges", x, bins)
    limits = [-2.0, 3.0] * len(bins)
    check("_histogramdd_bin_edges", x, bins, range=limits)
    check("_histogramdd_from_bin_cts", x, bins, range=limits, density=density)
    edges = [torch.linspace(-3, 3, n + 1) for n in bins]
    weight = torch.rand(count)
    expected = operator("_histogramdd_from_bin_tensors")(x, edges, weight=weight, density=density)
    kernel = find_kernel("aten::_histogramdd_from_bin_tensors")
    actual = kernel(x.numpy(), [e.numpy() for e in edges], weight=weight.numpy(), density=density)
    check_form(as_list(actual), [expected])
    check_close(actual, expected)


@quick
@given(st.lists(st.integers(0, 9), max_size=20), st.sampled_from([None, *FLOATS[:2], torch.int64]), st.integers(0, 12))
def test_bincount(values, weight_dtype, minlength):
    weights = None if weight_dtype is None else torch.arange(len(values)).to(weight_dtype)
    x = torch.tensor(values, dtype=torch.int64)
    if values:
        check("bincount", x, weights, minlength)
        check("bincount", x.to(torch.uint8), weights, minlength)
    else:
        assert find_kernel("aten::bincount")(x.numpy(), None, minlength).tolist() == [0] * minlength


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match="one dimension of integers that are not negative, got int64"):
        find_kernel("aten::bincount")(numpy.array([-1]))
    with pytest.raises(InvalidArgumentError, match=r"histogram: expected finite bounds in order, got \[1.0, 0.0\]"):
        find_kernel("aten::histogram.bin_ct")(numpy.zeros(3), 2, range=[1.0, 0.0])
    with pytest.raises(InvalidArgumentError, match="histc: argument `bins`: expected at least 1, got 0"):
        find_kernel("aten::histc")(numpy.zeros(3), 0)
