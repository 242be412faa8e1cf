"""Element-wise shims on the GPU against torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.native.shim import ShimError, call

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def values(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (0, 9) if dtype == torch.uint8 else (-9, 9)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensors = []
    for k in range(2):
        own = [
            1 if draw(st.booleans()) and draw(st.booleans()) else n for n in shape[draw(st.integers(0, len(shape))) :]
        ]
        order = draw(st.permutations(range(len(own))))
        x = values([own[i] for i in order], draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)) + k)
        tensors.append(x.permute([order.index(i) for i in range(len(own))]))
    return tensors[0], tensors[1]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    wide = want.dtype in (torch.float64, torch.complex128)
    tolerance = 1e-12 if wide else 1e-5 if want.dtype in (torch.float32, torch.complex64) else 2e-2
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)


@settings(max_examples=300, deadline=None)
@given(pairs(), st.sampled_from([1, -2, 3]))
def test_add_and_mul(case: tuple[torch.Tensor, torch.Tensor], alpha: int) -> None:
    a, b = case
    assume(torch.result_type(a, b) != torch.complex32)  # not served
    if torch.result_type(a, b) == torch.bool:
        alpha = 1
    want = torch.add(a, b, alpha=alpha)
    got = call("aoti_torch_cuda_add_Tensor", a.cuda(), b.cuda(), float(alpha), returns=1)
    same(got, want)
    if want.numel():  # the stride of a dimension of size one says nothing, and PyTorch has several
        theirs = torch.add(a.cuda(), b.cuda(), alpha=alpha)
        assert [got.stride(i) for i, n in enumerate(got.shape) if n > 1] == [
            theirs.stride(i) for i, n in enumerate(theirs.shape) if n > 1
        ]
    same(call("aoti_torch_cuda_mul_Tensor", a.cuda(), b.cuda(), returns=1), a * b)
    if b.dim() == 0:  # a scalar may stay on the CPU
        same(call("aoti_torch_cuda_mul_Tensor", a.cuda(), b, returns=1), a * b)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool])
def test_scalars(dtype: torch.dtype) -> None:
    x = values([33, 5], dtype, 1).t()
    same(call("aoti_torch_cuda_add_Scalar", x.cuda(), 1.5, 2.0, returns=1), torch.add(x, 1.5, alpha=2))
    same(call("aoti_torch_cuda_mul_Scalar", x.cuda(), -0.5, returns=1), x * -0.5)
    if not dtype.is_complex:
        x = x.abs() + 1
        same(call("aoti_torch_cuda_pow_Tensor_Scalar", x.cuda(), 1.7, returns=1), x**1.7)
        same(call("aoti_torch_cuda_pow_Scalar", 1.3, x.cuda(), returns=1), torch.pow(1.3, x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integer_pow_and_gcd(dtype: torch.dtype) -> None:
    a, b = values([40, 1], dtype, 3), values([1, 50], dtype, 4).abs()
    same(call("aoti_torch_cuda_pow_Tensor_Tensor", a.cuda(), b.cuda(), returns=1), a**b)
    same(call("aoti_torch_cuda_gcd", a.cuda(), b.cuda(), returns=1), torch.gcd(a, b))
    lowest = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0], dtype=dtype)
    same(
        call("aoti_torch_cuda_gcd", lowest.cuda(), lowest.flip(0).cuda(), returns=1), torch.gcd(lowest, lowest.flip(0))
    )
    same(call("aoti_torch_cuda_abs", lowest.cuda(), returns=1), lowest.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pow_edges(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    edge = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.0, 3.0, 0.5, inf, -inf, nan], dtype=dtype)
    a, b = edge[:, None], edge[None]
    same(call("aoti_torch_cuda_pow_Tensor_Tensor", a.cuda(), b.cuda(), returns=1), a**b)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_pow(dtype: torch.dtype) -> None:
    a, b = values([200], dtype, 1), values([200], dtype, 2)
    same(call("aoti_torch_cuda_pow_Tensor_Tensor", a.cuda(), b.cuda(), returns=1), a**b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_abs_angle_fill(dtype: torch.dtype) -> None:
    x = values([17, 9], dtype, 5)
    if dtype.is_floating_point:
        x[0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), -float("inf")])
    if dtype != torch.bool:
        same(call("aoti_torch_cuda_abs", x.cuda()[:, ::2], returns=1), x[:, ::2].abs())
    same(call("aoti_torch_cuda_angle", x.cuda(), returns=1), x.angle())
    for name in ("aoti_torch_cuda_fill__Scalar", "aoti_torch_aten_fill__Scalar"):
        y = x.cuda()
        call(name, y[1:, ::2], 1.0)
        want = x.clone()
        want[1:, ::2] = 1
        same(y, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar(dtype: torch.dtype) -> None:
    a, b = values([30, 1], dtype, 1).abs(), values([1, 40], dtype, 2)
    same(call("aoti_torch_cuda_polar", a.cuda(), b.cuda(), returns=1), torch.polar(*torch.broadcast_tensors(a, b)))


def test_subtract() -> None:
    a, b = values([5, 4], torch.float32, 1), values([4], torch.int32, 2)
    same(call("aoti_torch_aten_subtract_Tensor", a.cuda(), b.cuda(), 2.0, returns=1), torch.sub(a, b, alpha=2))


def test_many_dimensions() -> None:
    x = torch.rand([2] * 11 + [3, 2], device="cuda")[..., ::2, :].transpose(0, 12)
    same(call("aoti_torch_cuda_abs", -x, returns=1), x.cpu())
    wide = torch.rand([3] * 13, device="cuda")[(slice(None, None, 2),) * 13]
    with pytest.raises(ShimError, match="more dimensions than the kernels take"):
        call("aoti_torch_cuda_mul_Scalar", wide, 2.0, returns=1)
