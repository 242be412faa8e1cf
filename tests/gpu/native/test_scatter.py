"""The scatter family on the GPU against torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.faults import fault_of
from tests.native.shim import I32, call

REDUCES = ["sum", "prod", "mean", "amax", "amin"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.sampled_from([torch.float32, torch.int64, torch.int8, torch.uint8, torch.float64]),
    st.sampled_from(REDUCES),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_scatter_reduce(
    shape: list[int], dtype: torch.dtype, reduce: str, include_self: bool, flip: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    dim = data.draw(st.integers(0, max(len(shape) - 1, 0)))
    x = torch.randint(0, 5, shape, generator=generator).to(dtype)
    index_shape = [
        data.draw(st.integers(0, n)) if d != dim else data.draw(st.integers(0, 7)) for d, n in enumerate(shape)
    ]
    index = torch.randint(0, shape[dim] if shape else 1, index_shape, generator=generator)
    if data.draw(st.booleans()):
        index = index.to(torch.int32)
    src = torch.randint(0, 5, [n + 1 for n in index_shape], generator=generator).to(dtype)
    want = x.scatter_reduce(dim, index.long(), src, reduce, include_self=include_self)
    x, index, src = x.cuda(), index.cuda(), src.cuda()
    if flip and len(shape) > 1:
        x, index, src, dim = x.transpose(0, 1), index.transpose(0, 1), src.transpose(0, 1), {0: 1, 1: 0}.get(dim, dim)
        want = want.transpose(0, 1)
    out = torch.empty_like(x)
    call("aoti_torch_cuda_scatter_reduce_two_out", out, x, dim, index, src, reduce, I32(include_self))
    torch.testing.assert_close(out.cpu(), want, check_stride=False)
    inplace = x.clone()
    call("aoti_torch_scatter_reduce_out", inplace, inplace, dim, index, src, reduce, I32(include_self))
    torch.testing.assert_close(inplace.cpu(), want, check_stride=False)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_long_segments(reduce: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, index = torch.ones(5, 3).to(dtype), torch.randint(0, 5, (5000, 3))
    src = (torch.rand(5000, 3) * 0.002 + 0.999 if reduce == "prod" else torch.randn(5000, 3)).to(dtype)
    want = x.double().scatter_reduce(0, index, src.double(), reduce, include_self=False)
    outs = []
    for _ in range(2):
        outs.append(torch.empty_like(x, device="cuda"))
        call("aoti_torch_cuda_scatter_reduce_two_out", outs[-1], x.cuda(), 0, index.cuda(), src.cuda(), reduce, I32(0))
    assert torch.equal(*outs)
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outs[0].cpu().double(), want, rtol=tolerance, atol=tolerance)


def test_nan_wins() -> None:
    x, index = torch.zeros(3), torch.tensor([0, 0, 1, 2])
    src = torch.tensor([1.0, float("nan"), 2.0, -float("inf")])
    for reduce in ("amax", "amin"):
        out = torch.empty(3, device="cuda")
        call("aoti_torch_cuda_scatter_reduce_two_out", out, x.cuda(), 0, index.cuda(), src.cuda(), reduce, I32(1))
        assert torch.equal(out.cpu().isnan(), torch.tensor([True, False, False]))
        assert torch.equal(out.cpu()[1:], x.scatter_reduce(0, index, src, reduce)[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.complex64, torch.float32, torch.complex128])
def test_scatter_and_value(dtype: torch.dtype) -> None:
    x = torch.zeros(5, 4, dtype=dtype)
    index = torch.stack([torch.randperm(5)[:3] for _ in range(4)], 1)
    src = torch.rand(3, 4).mul(2).to(dtype)
    for name in ("aoti_torch_cuda_scatter_src_out", "aoti_torch_scatter_out"):
        out = torch.empty(4, 5, dtype=dtype, device="cuda").t()
        call(name, out, x.cuda(), 0, index.cuda(), src.cuda())
        assert torch.equal(out.cpu(), x.scatter(0, index, src))
    out = torch.empty_like(x, device="cuda")
    call("aoti_torch_cuda_scatter_value_out", out, x.cuda(), -2, index.cuda(), 1.0)
    assert torch.equal(out.cpu(), x.scatter(-2, index, 1.0))


def test_large_and_aliased() -> None:
    x = torch.randn(1000, 777)
    index = torch.argsort(torch.rand(1000, 777), 0)
    out = x.cuda()
    call("aoti_torch_cuda_scatter_src_out", out, out, 0, index.cuda(), out)  # the source is overwritten
    assert torch.equal(out.cpu(), x.scatter(0, index, x))


def test_an_index_out_of_range_is_reported() -> None:
    for bad in (7, -1):
        index, out = torch.tensor([0, bad], device="cuda"), torch.zeros(5, device="cuda")
        text = fault_of("aoti_torch_cuda_scatter_value_out", out, out, 0, index, 2.0)
        assert f"scatter: index {bad} is out of bounds" in text
        assert out.tolist() == [2, 0, 0, 0, 0]
        source = torch.ones(2, device="cuda")
        text = fault_of("aoti_torch_cuda_scatter_reduce_two_out", out, out, 0, index, source, "sum", I32(1))
        assert f"scatter_reduce: index {bad} is out of bounds" in text
        assert out.tolist() == [3, 0, 0, 0, 0]
