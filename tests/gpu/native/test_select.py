"""nonzero, masked_select, repeat_interleave, searchsorted, histc and segment_reduce on the GPU against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, ShimError, call

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def sparse(shape: list[int], dtype: torch.dtype, seed: int, share: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(shape, generator=generator) < share).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.where(x == 0, torch.tensor(-0.0, dtype=dtype), x)  # -0 is zero
    return x


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nonzero_any_strides(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(0, 6), max_size=5))
    x = sparse(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))).cuda()
    if len(shape) > 1:
        x = x.permute(draw(st.permutations(range(len(shape)))))
    got = call("aoti_torch_cuda_nonzero", x, returns=1)
    want = torch.nonzero(x)
    assert torch.equal(got, want)
    if want.numel():
        assert got.stride() == want.stride()
    size = draw(st.integers(0, 40))
    got = call("aoti_torch_cuda_nonzero_static", x, size, -7, returns=1)
    want = torch.nonzero_static(x.cpu(), size=size, fill_value=-7)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 1.0])
@pytest.mark.parametrize("shape", [[1023], [1024], [1025], [3000, 1001], [20, 30, 40, 50], [5000001]])
def test_nonzero_large(shape: list[int], share: float) -> None:
    x = sparse(shape, torch.float32, 1, share)
    got = call("aoti_torch_cuda_nonzero", x.cuda(), returns=1)
    assert torch.equal(got.cpu(), torch.nonzero(x))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_masked_select(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    mask_shape = [1 if draw(st.booleans()) else n for n in shape][draw(st.integers(0, len(shape))) :]
    mask = sparse(mask_shape, torch.bool, 2)
    if len(shape) > 1 and draw(st.booleans()):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    got = call("aoti_torch_cuda_masked_select", x.cuda(), mask.cuda(), returns=1)
    assert torch.equal(got.cpu(), torch.masked_select(x, mask))


def test_masked_select_large() -> None:
    x = torch.randn(3000, 1000)
    mask = sparse([3000, 1], torch.bool, 3)
    got = call("aoti_torch_cuda_masked_select", x.t().cuda().t(), mask.cuda(), returns=1)
    assert torch.equal(got.cpu(), torch.masked_select(x, mask))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_repeat_interleave(dtype: torch.dtype) -> None:
    for counts in ([], [0], [0, 0, 3, 0, 1], [1] * 5000, list(range(300))):
        x = torch.tensor(counts, dtype=dtype)
        want = torch.repeat_interleave(x)
        got = call("aoti_torch_cuda_repeat_interleave_Tensor", x.cuda(), Opt(None), returns=1)
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
        size = Opt(want.numel(), "int64")
        got = call("aoti_torch_cuda_repeat_interleave_Tensor", x.cuda(), size, returns=1)
        assert torch.equal(got.cpu(), want)
    with pytest.raises(ShimError, match="negative"):
        call("aoti_torch_cuda_repeat_interleave_Tensor", torch.tensor([2, -1], device="cuda"), Opt(None), returns=1)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_searchsorted(data: st.DataObject) -> None:
    draw = data.draw
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    dtype = draw(st.sampled_from(dtypes))
    n, rows = draw(st.integers(0, 300)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(n)
    shape = [n] if draw(st.booleans()) else [rows, n]
    sequence = torch.randint(0, 50, shape, generator=generator).sort(-1).values.to(dtype)
    values = torch.randint(0, 60, [rows, draw(st.integers(0, 50))], generator=generator).to(dtype)
    if values.numel() and dtype.is_floating_point:
        values[0, 0] = float("nan")
    right, int32 = draw(st.booleans()), draw(st.booleans())
    got = call(
        "aoti_torch_cuda_searchsorted_Tensor", sequence.cuda(), values.cuda(), int32, right, None, Opt(None), returns=1
    )
    want = torch.searchsorted(sequence, values, out_int32=int32, right=right)
    assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
    if len(shape) == 1:
        args = (values.cuda(), sequence.cuda(), int32, right)
        got = call("aoti_torch_cuda_bucketize_Tensor", *args, returns=1)
        assert torch.equal(got.cpu(), want)
        args = (sequence.cuda(), 25.0, int32, right, None, Opt(None))
        got = call("aoti_torch_cuda_searchsorted_Scalar", *args, returns=1)
        assert got.shape == () and got.item() == torch.searchsorted(sequence.double(), 25.0, right=right).item()


def test_searchsorted_sorter() -> None:
    x = torch.randn(4, 100)
    order = x.argsort(-1)
    values = torch.randn(4, 20)
    got = call(
        "aoti_torch_cuda_searchsorted_Tensor", x.cuda(), values.cuda(), False, False, None, Opt(order.cuda()), returns=1
    )
    assert torch.equal(got.cpu(), torch.searchsorted(x, values, sorter=order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("bins", [1, 7, 100, 8192, 10000])
@pytest.mark.parametrize("n", [0, 1, 1000, 1000000])
def test_histc(dtype: torch.dtype, bins: int, n: int) -> None:
    x = torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(7)).to(dtype)
    for low, high in ((0.0, 0.0), (10.0, 100.0)):
        if n == 0 and low == high and dtype == torch.uint8:
            continue
        got = call("aoti_torch_cuda_histc", x.cuda(), bins, low, high, returns=1)
        if not dtype.is_floating_point or dtype == torch.float64:
            want = torch.histc(x.double(), bins, low, high)
            assert got.dtype == dtype
            assert torch.equal(got.cpu(), want.to(torch.int64).to(dtype))  # counts wrap as the dtype does
        else:
            assert torch.equal(got.cpu(), torch.histc(x, bins, low, high))


def test_histc_edges_and_nan() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, -1.0, 5.0, float("nan")], device="cuda")
    got = call("aoti_torch_cuda_histc", x, 4, 0.0, 4.0, returns=1)
    assert got.tolist() == [1.0, 1.0, 1.0, 2.0]
    assert call("aoti_torch_cuda_histc", x, 4, 0.0, 0.0, returns=1).isnan().all()
    same = torch.full((5,), 3.0, device="cuda")
    assert call("aoti_torch_cuda_histc", same, 2, 0.0, 0.0, returns=1).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("inner", [(), (3,), (40,)])
@pytest.mark.parametrize("unsafe", [False, True])
def test_segment_reduce(dtype: torch.dtype, reduce: str, inner: tuple[int, ...], unsafe: bool) -> None:
    lengths = torch.tensor([3, 0, 70, 1, 26])
    x = (torch.rand(100, *inner, generator=torch.Generator().manual_seed(8)) + 0.5).to(dtype)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for initial in (None, 1.5):
        want = torch.segment_reduce(x.double(), reduce, lengths=lengths, axis=0, initial=initial)
        for by in ("lengths", "offsets"):
            got = call(
                "aoti_torch_cuda_segment_reduce", x.cuda(), reduce, Opt(lengths.cuda() if by == "lengths" else None),
                Opt(None), Opt(offsets.cuda() if by == "offsets" else None), 0, unsafe, Opt(initial, "double"),
                returns=1,
            )  # fmt: skip
            tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
            expected = want.to(dtype).double()
            torch.testing.assert_close(got.cpu().double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_segment_reduce_checks() -> None:
    x = torch.rand(10, device="cuda")
    for lengths in ([3, 3], [-1, 11], [5, 6]):
        with pytest.raises(ShimError, match="do not cut an axis of 10"):
            call(
                "aoti_torch_cuda_segment_reduce", x, "sum", Opt(torch.tensor(lengths, device="cuda")), Opt(None),
                Opt(None), 0, False, Opt(None), returns=1,
            )  # fmt: skip
