"""Cumulative operators on the GPU against torch on the CPU in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import CODES, Opt, call

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [
    ((1,), 0), ((1000,), 0), ((4, 33), 1), ((4, 256), 1), ((4, 257), 1), ((3, 2048), 1), ((3, 2049), 1),
    ((2, 70000), 1), ((1000000,), 0), ((300, 20000), 1), ((5, 7, 11), 1), ((70000, 3), 0), ((5000, 64), 0),
    ((1, 100000, 40), 1), ((100000, 5), 1), ((20000, 20, 3), 1), ((3, 0), 1), ((), 0),
]  # fmt: skip


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of the largest value: running sums lose by what they have passed."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    scale = want.abs().max().clamp(min=1)
    assert ((got.cpu().to(want.dtype) - want).abs().max() <= TOLERANCE[dtype] * scale).item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_sums_and_products(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(shape, generator=generator) * 0.01).to(dtype)
    got = call("aoti_torch_cuda_cumsum", x.cuda(), dim, Opt(None), returns=1)
    assert got.dtype == dtype
    assert_near(got, x.double().cumsum(dim), dtype)
    assert torch.equal(got, call("aoti_torch_cuda_cumsum", x.cuda(), dim, Opt(None), returns=1))
    y = (1 + (torch.rand(shape, generator=generator) - 0.5) * 1e-3).to(dtype)
    got = call("aoti_torch_cuda_cumprod", y.cuda(), dim, Opt(None), returns=1)
    want = y.double().cumprod(dim)
    tolerance = dtype if dtype != torch.float32 else torch.float16  # a rounding error a factor
    assert_near(got, want, tolerance)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.int16])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_integers_are_exact(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    for name in ("cumsum", "cumprod"):
        got = call(f"aoti_torch_cuda_{name}", x.cuda(), dim, Opt(None), returns=1)
        want = getattr(torch, name)(x, dim)
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
    narrow = Opt(CODES[torch.int8], "int32")
    got = call("aoti_torch_cuda_cumsum", x.cuda(), dim, narrow, returns=1)
    assert torch.equal(got.cpu(), torch.cumsum(x, dim, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5000, dtype=dtype, generator=torch.Generator().manual_seed(3))
    got = call("aoti_torch_cuda_cumsum", x.cuda(), 1, Opt(None), returns=1)
    torch.testing.assert_close(got.cpu(), x.to(torch.complex128).cumsum(1).to(dtype), rtol=1e-4, atol=1e-4)
    y = x / x.abs()
    got = call("aoti_torch_cuda_cumprod", y.cuda(), 1, Opt(None), returns=1)
    torch.testing.assert_close(got.cpu(), y.to(torch.complex128).cumprod(1).to(dtype), rtol=1e-3, atol=1e-3)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    x = torch.rand(shape, generator=torch.Generator().manual_seed(4)).cuda()
    if len(shape) > 1:
        x = x.permute(draw(st.permutations(range(len(shape)))))
    if x.dim() and x.shape[0] > 1 and draw(st.booleans()):
        x = x[1::2]
    dim = draw(st.integers(-max(x.dim(), 1), max(x.dim(), 1) - 1))
    out = draw(st.sampled_from([None, torch.float32, torch.float64, torch.int64, torch.float16]))
    code = Opt(None if out is None else CODES[out], "int32")
    got = call("aoti_torch_cuda_cumsum", x, dim, code, returns=1)
    want = torch.cumsum(x.cpu(), dim, dtype=out)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)
    got = call("aoti_torch_cuda_logcumsumexp", x, dim, returns=1)
    torch.testing.assert_close(got.cpu(), torch.logcumsumexp(x.cpu().contiguous(), dim), rtol=1e-5, atol=1e-5)
    for name in ("cummax", "cummin"):
        values, indices = call(f"aoti_torch_cuda_{name}", x, dim, returns=2)
        want_pair = getattr(torch, name)(x.cpu(), dim)
        assert torch.equal(values.cpu(), want_pair.values) and torch.equal(indices.cpu(), want_pair.indices)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_extrema(name: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    if dtype.is_floating_point and x.numel() > 10:
        flat = x.view(-1)
        flat[x.numel() // 2 :: 97] = float("nan")
        flat[1] = -0.0
        flat[2] = -float("inf")
    values, indices = call(f"aoti_torch_cuda_{name}", x.cuda(), dim, returns=2)
    want = getattr(torch, name)(x, dim)
    torch.testing.assert_close(values.cpu(), want.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices.cpu(), want.indices)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_logcumsumexp(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    got = call("aoti_torch_cuda_logcumsumexp", x.cuda(), dim, returns=1)
    assert_near(got, torch.logcumsumexp(x.double(), dim), dtype)


def test_logcumsumexp_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    for row in ([-inf, -inf, 1.0], [inf, 1.0, inf], [1.0, nan, 2.0], [-inf, inf, -inf], [1000.0, 1000.0, -1000.0]):
        x = torch.tensor(row)
        got = call("aoti_torch_cuda_logcumsumexp", x.cuda(), 0, returns=1)
        torch.testing.assert_close(got.cpu(), torch.logcumsumexp(x, 0), equal_nan=True)
