"""Grid sampling, distances, the trilinear product and Fourier transforms on the GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, call

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def seeded(data: st.DataObject) -> torch.Generator:
    return torch.Generator().manual_seed(data.draw(st.integers(0, 999)))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_grid_sampler_3d(data: st.DataObject) -> None:
    draw = data.draw
    generator = seeded(data)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    size = [draw(st.integers(1, 6)) for _ in range(3)]
    x = torch.randn(2, draw(st.integers(1, 5)), *size, generator=generator).to(dtype).cuda()
    if draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last_3d)
    out = [draw(st.integers(0, 7)) for _ in range(3)]
    far = draw(st.sampled_from([1, 1e6]))
    grid = (torch.randn(2, *out, 3, generator=generator) * far).to(dtype).cuda()
    if grid.numel() and draw(st.booleans()):
        grid.view(-1)[0] = torch.nan
    mode, padding, align = draw(st.integers(0, 1)), draw(st.integers(0, 2)), draw(st.booleans())
    want = torch.ops.aten.grid_sampler_3d(x, grid, mode, padding, align)
    got = call("aoti_torch_cuda_grid_sampler_3d", x, grid, mode, padding, align, returns=1)
    assert got.stride() == want.stride()
    if padding != 2 or far == 1 or dtype == torch.float64:  # reflecting far positions takes float32 all its digits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grid_sampler_3d_of_half_types(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 6, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    grid = (torch.rand(2, 4, 4, 4, 3, generator=torch.Generator().manual_seed(2)) * 2 - 1).to(dtype)
    want = torch.ops.aten.grid_sampler_3d(x.double(), grid.double(), 0, 0, False)
    got = call("aoti_torch_cuda_grid_sampler_3d", x.cuda(), grid.cuda(), 0, 0, False, returns=1)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-2, atol=2e-2)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_cdist(data: st.DataObject) -> None:
    draw = data.draw
    generator = seeded(data)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    batch = draw(st.sampled_from([([], []), ([3], [3]), ([3], [1]), ([2, 1], [3])]))
    rows, columns, n = draw(st.integers(0, 70)), draw(st.integers(0, 70)), draw(st.integers(0, 70))
    a = torch.randn(*batch[0], rows, n, generator=generator).to(dtype)
    b = torch.randn(*batch[1], columns, n, generator=generator).to(dtype)
    p = draw(st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5, float("inf")]))
    mode = draw(st.sampled_from([None, 0, 1, 2]))
    want = torch.cdist(a.double(), b.double(), p, "donot_use_mm_for_euclid_dist")
    got = call("aoti_torch_cuda__cdist_forward", a.cuda(), b.cuda(), p, Opt(mode, "int64"), returns=1)
    assert got.shape == want.shape
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (2, 0), (7, 5), (100, 33), (65, 64)])
def test_pdist(p: float, shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    got = call("aoti_torch_cuda__pdist_forward", x.cuda(), p, returns=1)
    torch.testing.assert_close(got.cpu(), torch.nn.functional.pdist(x, p), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_with_nan(p: float) -> None:
    a = torch.randn(3, 40, device="cuda")
    a[1, 17] = torch.nan
    got = call("aoti_torch_cuda__cdist_forward", a, a, p, Opt(None), returns=1)
    assert got.isnan()[1].all()
    assert not got[0, 0].isnan()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (7, 3, 4, 5), (33, 20, 17, 9), (1, 1, 1, 1)])
def test_trilinear(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    b, i, j, o = shape
    generator = torch.Generator().manual_seed(7)
    x1, x2, w = (torch.randn(s, generator=generator).to(dtype) for s in ((b, i), (b, j), (o, i, j)))
    want = torch.einsum("bi,oij,bj->bo", x1.double(), w.double(), x2.double())
    # nn.Bilinear's own call.
    args = ([1, 3], [0], [1, 2], [2, 3])
    got = call("aoti_torch_cuda__trilinear", x1.cuda(), w.cuda(), x2.cuda(), *args, 1, returns=1)
    assert got.shape == want.shape
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got.cpu().double() / scale, want / scale, rtol=0, atol=tolerance)


def draw_signal(data: st.DataObject, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    draw = data.draw
    ndim = draw(st.integers(1, 5))
    order = draw(st.permutations(range(ndim)))
    x = torch.randn([draw(st.integers(1, 9)) for _ in range(ndim)], generator=seeded(data), dtype=torch.float64)
    x = x + 1j * torch.randn(x.shape, dtype=torch.float64) if dtype.is_complex else x
    x = x.to(dtype).cuda().permute(order)
    if draw(st.booleans()):
        room = torch.zeros([n + 1 for n in x.shape], dtype=dtype, device="cuda")
        room[tuple(slice(1, None) for _ in x.shape)] = x
        x = room[tuple(slice(1, None) for _ in x.shape)]
    dims = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
    return x, dims


def is_defined(x: torch.Tensor, dims: list[int]) -> bool:
    """Whether PyTorch says which strides a result has.

    Three dimensions are transformed at a time, in the order of their strides. A dimension of size one may have another
    one's stride, and which of the two comes first is then left to std::partition; PyTorch's own rules for shapes, on
    which compiled models count, keep them in order, as ours do.
    """
    return len(dims) <= 3 or 1 not in x.shape


def strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fft_c2c(data: st.DataObject) -> None:
    draw = data.draw
    x, dims = draw_signal(data, draw(st.sampled_from([torch.complex64, torch.complex128])))
    args = (dims, draw(st.integers(0, 2)), draw(st.booleans()))
    want = torch.ops.aten._fft_c2c(x, *args)
    got = call("aoti_torch_cuda__fft_c2c", x, *args, returns=1)
    assert not is_defined(x, dims) or strides(got) == strides(want)
    tolerance = 1e-4 if x.dtype == torch.complex64 else 1e-12
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 20)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fft_r2c(data: st.DataObject) -> None:
    draw = data.draw
    x, dims = draw_signal(data, draw(st.sampled_from([torch.float32, torch.float64])))
    onesided = draw(st.booleans())
    args = (dims, draw(st.integers(0, 2)), onesided)
    want = torch.ops.aten._fft_r2c(x.cpu().double(), *args)
    got = call("aoti_torch_cuda__fft_r2c", x, *args, returns=1)
    device = torch.ops.aten._fft_r2c(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"), *args)
    assert not onesided or not is_defined(x, dims) or strides(got) == strides(device)
    tolerance = 1e-4 if x.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got.cpu().to(want.dtype), want, rtol=tolerance, atol=tolerance * 20)


@pytest.mark.parametrize("length", [1 << 20, 1000003, 65536])
def test_long_transforms(length: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    got = call("aoti_torch_cuda__fft_r2c", x.cuda(), [0], 0, True, returns=1)
    want = torch.fft.rfft(x.double())
    error = (got.cpu().to(want.dtype) - want).abs().max() / want.abs().max()
    assert error.item() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 33, 64), (1, 5, 7), (3, 100, 128), (16, 64, 63), (17, 64, 128), (200, 48, 40), (0, 3, 4)]
)
def test_weight_int8pack_mm(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scales = torch.rand(n, generator=generator).to(dtype)
    want = x.double() @ w.double().t() * scales.double()
    got = call("aoti_torch_cuda__weight_int8pack_mm", x.cuda(), w.cuda(), scales.cuda(), returns=1)
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(got.cpu().double() / scale, want / scale, rtol=0, atol=tolerance)
