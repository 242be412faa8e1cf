"""index, index_put, masked_scatter and index_reduce on the GPU against torch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.faults import fault_of
from tests.native.shim import I32, Handles, OptHandles, call

DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex128, torch.float64]


def values(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gpu(indices: list[Any]) -> list[Any]:
    return [None if i is None else i.cuda() for i in indices]


@st.composite
def expressions(draw: st.DrawFn, masks: bool = True) -> tuple[torch.Tensor, list[Any]]:
    """A tensor with any strides and an index expression on it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    seed = draw(st.integers(0, 9999))
    order = draw(st.permutations(range(len(shape))))
    x = values([shape[i] for i in order], draw(st.sampled_from(DTYPES)), seed)
    x = x.permute([order.index(i) for i in range(len(shape))])
    generator = torch.Generator().manual_seed(seed)
    broadcast = draw(st.lists(st.integers(1, 4), max_size=3))
    indices: list[Any] = []
    masked = None
    d = 0
    while d < len(shape):
        kind = draw(
            st.sampled_from(["none", "index", "index", "mask"] if masks and masked is None else ["none", "index"])
        )
        if kind == "none":
            indices.append(None)
        elif kind == "mask":
            width = draw(st.integers(1, min(2, len(shape) - d)))
            masked = torch.rand(shape[d : d + width], generator=generator) < 0.5
            indices.append(masked)
            d += width - 1
        else:
            keep = draw(st.integers(0, len(broadcast)))
            own = [1 if draw(st.booleans()) else n for n in broadcast[keep:]]
            dtype = draw(st.sampled_from([torch.int64, torch.int32]))
            indices.append(torch.randint(-shape[d], shape[d], own, generator=generator).to(dtype))
        d += 1
    if masked is not None:  # other indices must broadcast with the number of set elements
        indices = [i if i is None or i is masked else i.reshape(-1)[:1] for i in indices]
    if all(i is None for i in indices):
        indices[0] = torch.zeros(2, dtype=torch.int64)
    return x, indices


@settings(max_examples=300, deadline=None)
@given(expressions())
def test_index(case: tuple[torch.Tensor, list[Any]]) -> None:
    x, indices = case
    want = torch.ops.aten.index.Tensor(x, indices)  # in Python's brackets a 0-D index is a number
    on_gpu = x.cuda()  # keeps dense strides
    got = call("aoti_torch_cuda_index_Tensor", on_gpu, OptHandles(gpu(indices)), returns=1)
    assert torch.equal(got.cpu(), want)
    assert got.shape == want.shape
    if want.numel() != 0:
        eager = torch.ops.aten.index.Tensor(on_gpu, gpu(indices))
        # The stride of a dimension of size 1 says nothing.
        for size, stride, expected in zip(got.shape, got.stride(), eager.stride(), strict=True):
            assert size == 1 or stride == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.complex128])
@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_rows_of_a_table(dtype: torch.dtype, width: int) -> None:
    x, rows = values([5000, width], dtype, 1), torch.randint(-5000, 5000, (30000,))
    got = call("aoti_torch_cuda_index_Tensor", x.cuda(), OptHandles([rows.cuda()]), returns=1)
    assert torch.equal(got.cpu(), x[rows])
    part = x[:, 1:] if width > 1 else x  # rows that are not 16-byte aligned
    got = call("aoti_torch_cuda_index_Tensor", x.cuda()[:, 1:] if width > 1 else x.cuda(), OptHandles([rows.cuda()]),
               returns=1)  # fmt: skip
    assert torch.equal(got.cpu(), part[rows])


def test_many_indices_and_empty() -> None:
    x = values([2] * 10, torch.float32, 2)
    indices = [torch.randint(0, 2, (50,)) for _ in range(10)]
    assert torch.equal(
        call("aoti_torch_cuda_index_Tensor", x.cuda(), OptHandles(gpu(indices)), returns=1).cpu(), x[tuple(indices)]
    )
    none = torch.zeros(0, dtype=torch.int64)
    assert call("aoti_torch_cuda_index_Tensor", x.cuda(), OptHandles([none.cuda()]), returns=1).shape == (0, *[2] * 9)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    assert call("aoti_torch_cuda_index_Tensor", x.cuda(), OptHandles([mask.cuda()]), returns=1).shape == (0, *[2] * 8)


def test_large_mask() -> None:
    x = torch.rand(3_000_001)
    mask = x < 0.3
    got = call("aoti_torch_cuda_index_Tensor", x.cuda(), OptHandles([mask.cuda()]), returns=1)
    assert torch.equal(got.cpu(), x[mask])


@settings(max_examples=200, deadline=None)
@given(expressions(), st.booleans())
def test_index_put(case: tuple[torch.Tensor, list[Any]], scalar: bool) -> None:
    x, indices = case
    shape = torch.ops.aten.index.Tensor(x, indices).shape
    # Equal values wherever one place may be named twice.
    source = torch.full([] if scalar else list(shape), 3).to(x.dtype)
    want = torch.ops.aten.index_put_(x.clone(), indices, source)
    got = call("aoti_torch_cuda_index_put", x.cuda(), OptHandles(gpu(indices)), source.cuda(), I32(0), returns=1)
    assert torch.equal(got.cpu(), want)
    if scalar:  # a 0-D value may be on the CPU
        got = call("aoti_torch_cuda_index_put", x.cuda(), OptHandles(gpu(indices)), source, I32(0), returns=1)
        assert torch.equal(got.cpu(), want)


@settings(max_examples=200, deadline=None)
@given(expressions(), st.integers(0, 99))
def test_index_put_accumulate(case: tuple[torch.Tensor, list[Any]], seed: int) -> None:
    x, indices = case
    # A 0-D index is a number in Python's brackets, a tensor for the operator.
    source = values(list(torch.ops.aten.index.Tensor(x, indices).shape), x.dtype, seed)
    want = torch.ops.aten.index_put_(x.clone(), indices, source, True)
    got = call("aoti_torch_cuda_index_put", x.cuda(), OptHandles(gpu(indices)), source.cuda(), I32(1), returns=1)
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("shape", [(7,), (7, 33), (7, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_accumulate_many_is_deterministic(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, rows = torch.randn(shape).to(dtype), torch.randint(-7, 7, (20000,))
    source = torch.randn(20000, *shape[1:]).to(dtype)
    want = x.double().index_put((rows,), source.double(), accumulate=True)
    args = (x.cuda(), OptHandles([rows.cuda()]), source.cuda(), I32(1))
    first = call("aoti_torch_cuda_index_put", *args, returns=1)
    assert all(torch.equal(first, call("aoti_torch_cuda_index_put", *args, returns=1)) for _ in range(3))
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 1.0, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(first.cpu().double(), want, rtol=1e-2, atol=tolerance)


def test_index_put_out() -> None:
    x, rows = values([6, 5], torch.float32, 3), torch.tensor([1, -1, 3])
    source = torch.arange(15.0).reshape(3, 5)
    want = x.clone().index_put_((rows,), source)
    out = torch.zeros(6, 5, device="cuda")
    call("aoti_torch_index_put_out", out, x.cuda(), Handles([rows.cuda()]), I32(1), source.cuda(), I32(0))
    assert torch.equal(out.cpu(), want)
    inplace = x.cuda()
    call("aoti_torch_index_put_out", inplace, inplace, Handles([rows.cuda()]), I32(1), source.cuda(), I32(0))
    assert torch.equal(inplace.cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [[5, 7], [1], [100, 300], [0, 3]])
def test_masked_scatter(dtype: torch.dtype, shape: list[int]) -> None:
    x, mask = values(shape, dtype, 1), torch.rand(shape) < 0.4
    source = values([max(int(mask.sum()), 1) + 3], dtype, 2)
    got = call("aoti_torch_cuda_masked_scatter", x.cuda(), mask.cuda(), source.cuda(), returns=1)
    assert torch.equal(got.cpu(), x.masked_scatter(mask, source))
    if len(shape) == 2:
        got = call("aoti_torch_cuda_masked_scatter", x.cuda().t(), mask.cuda().t(), source.cuda(), returns=1)
        assert torch.equal(got.cpu(), x.t().masked_scatter(mask.t(), source))


@pytest.mark.filterwarnings("ignore:index_reduce")  # PyTorch calls it beta
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.float64])
@pytest.mark.parametrize("include_self", [True, False])
def test_index_reduce(reduce: str, dtype: torch.dtype, include_self: bool) -> None:
    for shape, dim in (([5, 4, 6], 1), ([5], 0), ([5, 4], -2), ([3, 0], 0)):
        x = values(shape, dtype, 4)
        index = torch.randint(0, shape[dim], (9,))
        source = values([9 if d == dim % len(shape) else n for d, n in enumerate(shape)], dtype, 5).clamp_max(2)
        want = x.clone().index_reduce_(dim, index, source, reduce, include_self=include_self)
        args = (x.cuda(), dim, index.cuda(), source.cuda(), reduce, I32(include_self))
        torch.testing.assert_close(call("aoti_torch_cuda_index_reduce", *args, returns=1).cpu(), want)


ERRORS = [
    ("aoti_torch_cuda_index_Tensor", lambda i: (OptHandles([i]),), 1, "index: index 12 is out of bounds"),
    ("aoti_torch_cuda_index_put", lambda i: (OptHandles([i]), torch.ones(3, device="cuda"), I32(0)), 1,
     "index_put: index 12 is out of bounds"),
    ("aoti_torch_cuda_index_put", lambda i: (OptHandles([i]), torch.ones(3, device="cuda"), I32(1)), 1,
     "index_put: index 12 is out of bounds"),
    ("aoti_torch_cuda_index_reduce", lambda i: (0, i, torch.ones(3, device="cuda"), "amax", I32(1)), 1,
     "index_reduce: index 12 is out of bounds"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "returns", "text"), ERRORS)
def test_an_index_out_of_range_is_reported_and_the_device_lives(
    name: str, arguments: Any, returns: int, text: str
) -> None:
    x = torch.zeros(5, device="cuda")
    index = torch.tensor([1, 12, 2], device="cuda")
    assert text in fault_of(name, x, *arguments(index), returns=returns)


def test_masked_scatter_without_enough_source() -> None:
    x = torch.zeros(5, device="cuda")
    text = fault_of("aoti_torch_cuda_masked_scatter", x, x == 0, torch.ones(3, device="cuda"), returns=1)
    assert "masked_scatter: the mask sets 5 elements, but 'source' has fewer" in text
