"""The scatter family, index_reduce and segment_reduce against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import Opt, ShimError, call

REDUCES = ["sum", "prod", "mean", "amax", "amin"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=3),
    st.sampled_from([torch.float32, torch.int64, torch.int8, torch.float64]),
    st.sampled_from(REDUCES),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_scatter_reduce(
    shape: list[int], dtype: torch.dtype, reduce: str, include_self: bool, flip: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    dim = data.draw(st.integers(0, max(len(shape) - 1, 0)))
    x = torch.randint(-4, 5, shape, generator=generator).to(dtype)
    index_shape = [
        data.draw(st.integers(0, n)) if d != dim else data.draw(st.integers(0, 7)) for d, n in enumerate(shape)
    ]
    index = torch.randint(0, shape[dim] if shape else 1, index_shape, generator=generator)
    src = torch.randint(-4, 5, [n + 1 for n in index_shape], generator=generator).to(dtype)
    if flip and len(shape) > 1:
        x, index, src, dim = x.transpose(0, 1), index.transpose(0, 1), src.transpose(0, 1), {0: 1, 1: 0}.get(dim, dim)
    out = torch.empty_like(x)
    expected = x.scatter_reduce(dim, index, src, reduce, include_self=include_self)
    call("aoti_torch_cpu_scatter_reduce_two_out", out, x, dim, index, src, reduce, include_self)
    torch.testing.assert_close(out, expected)
    inplace = x.clone()
    call("aoti_torch_scatter_reduce_out", inplace, inplace, dim, index, src, reduce, include_self)
    torch.testing.assert_close(inplace, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.complex64, torch.float32])
def test_scatter_and_value(dtype: torch.dtype) -> None:
    x = torch.zeros(5, 4, dtype=dtype)
    index = torch.stack([torch.randperm(5)[:3] for _ in range(4)], 1)
    src = torch.rand(3, 4).mul(2).to(dtype)
    for name in ("aoti_torch_cpu_scatter_src_out", "aoti_torch_scatter_out"):
        out = torch.empty(4, 5, dtype=dtype).t()
        call(name, out, x, 0, index, src)
        assert torch.equal(out, x.scatter(0, index, src))
    out = torch.empty_like(x)
    call("aoti_torch_cpu_scatter_value_out", out, x, -2, index, 1.0)
    assert torch.equal(out, x.scatter(-2, index, 1.0))


def test_nan_and_many_threads() -> None:
    x = torch.rand(300, 50)
    src = torch.rand(300, 400)
    src[0, 0] = float("nan")
    index = torch.randint(0, 50, (300, 400))
    for reduce in REDUCES:
        out = torch.empty_like(x)
        call("aoti_torch_cpu_scatter_reduce_two_out", out, x, 1, index, src, reduce, True)
        torch.testing.assert_close(out, x.scatter_reduce(1, index, src, reduce), equal_nan=True)


def test_an_index_out_of_range_writes_nothing() -> None:
    x, out = torch.ones(3), torch.full((3,), 7.0)
    for bad in (3, -1):
        with pytest.raises(ShimError, match=f"scatter: index {bad} is out of bounds for dimension 0 with size 3"):
            call("aoti_torch_cpu_scatter_src_out", out, x, 0, torch.tensor([0, bad]), torch.zeros(2))
    assert torch.equal(out, torch.full((3,), 7.0))


def test_errors() -> None:
    x, index, src = torch.ones(3), torch.tensor([0]), torch.ones(1)
    with pytest.raises(ShimError, match='scatter_reduce: \'reduce\' is "median", expected "sum"'):
        call("aoti_torch_cpu_scatter_reduce_two_out", x, x, 0, index, src, "median", True)
    with pytest.raises(ShimError, match="scatter: 'src' is float64, expected float32 as 'self'"):
        call("aoti_torch_cpu_scatter_src_out", x, x, 0, index, src.double())
    with pytest.raises(ShimError, match="scatter: 'index' is 2-D, expected 1-D as 'self'"):
        call("aoti_torch_cpu_scatter_src_out", x, x, 0, index[None], src)
    with pytest.raises(ShimError, match=r"scatter: 'index' of shape \[2\] is larger than 'src' of shape \[1\]"):
        call("aoti_torch_cpu_scatter_src_out", x, x, 0, torch.tensor([0, 1]), src)


@pytest.mark.filterwarnings("ignore:index_reduce")  # PyTorch calls it beta
@pytest.mark.parametrize("reduce", REDUCES[1:])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_reduce(reduce: str, include_self: bool, dim: int) -> None:
    x = torch.randn(4, 5, 3)
    index = torch.randint(0, x.shape[dim], (6,))
    shape = list(x.shape)
    shape[dim] = 6
    source = torch.randn(shape)
    got = call("aoti_torch_cpu_index_reduce", x, dim, index, source, reduce, include_self, returns=1)
    torch.testing.assert_close(got, x.index_reduce(dim, index, source, reduce, include_self=include_self))
    with pytest.raises(ShimError, match="index_reduce: 'source' has shape"):
        call("aoti_torch_cpu_index_reduce", x, dim, index[:2], source, reduce, include_self, returns=1)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("initial", [None, 2.0])
def test_segment_reduce(reduce: str, initial: float | None) -> None:
    data = torch.randn(7, 3)
    lengths = torch.tensor([2, 0, 4, 1])
    start = Opt(initial, "double")
    got = call("aoti_torch_cpu_segment_reduce", data, reduce, Opt(lengths), None, None, 0, False, start, returns=1)
    expected = torch.segment_reduce(data, reduce, lengths=lengths, axis=0, initial=initial)
    torch.testing.assert_close(got, expected, equal_nan=True)
    offsets = torch.tensor([0, 2, 2, 6, 7])
    got = call("aoti_torch_cpu_segment_reduce", data, reduce, None, None, Opt(offsets), 0, False, start, returns=1)
    torch.testing.assert_close(got, expected, equal_nan=True)
    cuts = Opt(torch.tensor([3.0, 4.0]))
    with pytest.raises(ShimError, match="segment_reduce: 'lengths' is float32, expected int32 or int64"):
        call("aoti_torch_cpu_segment_reduce", data, reduce, cuts, None, None, 0, False, start, returns=1)
    with pytest.raises(ShimError, match="segment_reduce: 'lengths' sum to 5, expected 7"):
        call(
            "aoti_torch_cpu_segment_reduce",
            data,
            reduce,
            Opt(torch.tensor([5])),
            None,
            None,
            0,
            False,
            start,
            returns=1,
        )
