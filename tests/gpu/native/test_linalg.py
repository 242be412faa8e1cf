"""Linear algebra on the GPU against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.native.shim import ShimError, call

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
BATCHES = [(), (3,), (2, 0), (7, 2)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(
        dtype
    )


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    tolerance = 1e-3 if got.dtype in (torch.float32, torch.complex64) else 1e-9
    torch.testing.assert_close(got.cpu().to(want.dtype), want, rtol=tolerance, atol=tolerance)


def factor(*shape: int, dtype: torch.dtype, upper: bool) -> torch.Tensor:
    a = random(*shape, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    n = shape[-1]
    spd = a @ a.mH / max(n, 1) + torch.eye(n, dtype=a.dtype)
    return torch.linalg.cholesky(spd, upper=upper).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("n", [0, 1, 5, 40])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(dtype: torch.dtype, batch: tuple[int, ...], n: int, upper: bool) -> None:
    u = factor(*batch, n, n, dtype=dtype, upper=upper)
    b = random(*batch, n, 3, dtype=dtype, seed=2)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    got = call("aoti_torch_cuda_cholesky_solve", b.cuda(), u.cuda(), upper, returns=1)
    close(got, torch.cholesky_solve(b.to(wide), u.to(wide), upper))
    inverse = call("aoti_torch_cuda_cholesky_inverse", u.cuda(), upper, returns=1)
    close(inverse, torch.cholesky_inverse(u.to(wide), upper))
    assert torch.equal(inverse, inverse.mH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "n"), [((), 7), ((9,), 33), ((2, 1), 5), ((), 600), ((6,), 0)])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_solve(
    dtype: torch.dtype, batch: tuple[int, ...], n: int, upper: bool, transpose: bool, unit: bool
) -> None:
    a = random(*batch, n, n, dtype=dtype) / max(n, 1) + torch.eye(n, dtype=dtype) * 2
    b = random(n, 4, dtype=dtype, seed=3)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x, coefficient = call("aoti_torch_cuda_triangular_solve", b.cuda(), a.cuda(), upper, transpose, unit, returns=2)
    matrix = a.to(wide).mT if transpose else a.to(wide)
    close(x, torch.linalg.solve_triangular(matrix, b.to(wide), upper=upper != transpose, unitriangular=unit))
    assert torch.equal(coefficient.cpu(), a)
    if n:
        assert x.stride()[-2:] == (1, n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("m", "n"), [(5, 5), (9, 4), (4, 9), (0, 3), (64, 64)])
def test_qr(dtype: torch.dtype, batch: tuple[int, ...], m: int, n: int) -> None:
    a = random(*batch, m, n, dtype=dtype)
    factors, tau = call("aoti_torch_cuda_geqrf", a.cuda(), returns=2)
    k = min(m, n)
    assert factors.shape == a.shape
    assert tau.shape == (*batch, k)
    if a.numel() == 0:
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    q = torch.linalg.householder_product(factors.cpu().to(wide)[..., :, :k], tau.cpu().to(wide))
    close((q @ factors.cpu().to(wide).triu()[..., :k, :]).to(dtype), a.to(wide))
    for left in (False, True):
        c = random(*batch, *((m, 3) if left else (3, m)), dtype=dtype, seed=4)
        for transpose in (False, True):
            got = call("aoti_torch_cuda_ormqr", factors, tau, c.cuda(), left, transpose, returns=1)
            want = torch.ormqr(factors.cpu().to(wide), tau.cpu().to(wide), c.to(wide), left, transpose)
            close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("m", "n"), [(5, 5), (9, 4), (4, 9), (1, 1)])
def test_lu_unpack(dtype: torch.dtype, batch: tuple[int, ...], m: int, n: int) -> None:
    lu, pivots = torch.linalg.lu_factor(random(*batch, m, n, dtype=dtype))
    want = torch.lu_unpack(lu, pivots)
    got = call("aoti_torch_cuda_lu_unpack", lu.cuda(), pivots.cuda(), True, True, returns=3)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b)
    assert call("aoti_torch_cuda_lu_unpack", lu.cuda(), pivots.cuda(), False, True, returns=3)[1].shape == (0,)


def test_lu_unpack_reports_a_pivot_that_is_no_row() -> None:
    lu, pivots = torch.eye(3, device="cuda"), torch.tensor([1, 2, 9], dtype=torch.int32, device="cuda")
    texts = []
    # The call itself finds the report, or the next operator on the device does.
    for name, args, returns in (("cuda_lu_unpack", (lu, pivots, True, True), 3), ("clone", (lu,), 1)):
        try:
            call(f"aoti_torch_{name}", *args, returns=returns)
        except ShimError as error:
            texts.append(str(error))
        torch.cuda.synchronize()
    assert len(texts) == 1
    assert "'LU_pivots' holds 9, which is no row" in texts[0]
