"""SVD, eigenvalues, QR and functions of matrices: through reconstruction where the result is not unique."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check, check_close, run_both

from untorch.runtime.errors import InvalidArgumentError, ModelError
from untorch.runtime.registry import find_kernel

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128])
BATCHES = st.sampled_from([(), (3,), (2, 1), (0,)])
quick = settings(max_examples=25, deadline=None)


def matrix(batch: tuple[int, ...], m: int, n: int, dtype: torch.dtype, columns: bool = False) -> torch.Tensor:
    a = torch.randn(*batch, *((n, m) if columns else (m, n)), dtype=dtype, generator=torch.Generator().manual_seed(1))
    return a.mT if columns else a


def hermitian(a: torch.Tensor) -> torch.Tensor:
    return a + a.mH


@quick
@given(BATCHES, st.integers(0, 5), st.integers(0, 5), DTYPES, st.booleans(), st.booleans())
def test_svd(batch, m, n, dtype, columns, full):
    a = matrix(batch, m, n, dtype, columns)
    (u, s, vh), expected = run_both("_linalg_svd", a, full)
    check_close(s, expected[1])
    k = min(m, n)
    check_close((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, factor=5)
    check_close(u.conj().swapaxes(-1, -2) @ u, torch.eye(u.shape[-1], dtype=dtype).expand(*batch, -1, -1), factor=5)
    check("_linalg_svd", a, full, False)


@quick
@given(BATCHES, st.integers(0, 5), DTYPES, st.sampled_from("LU"))
def test_eigh(batch, n, dtype, triangle):
    a = hermitian(matrix(batch, n, n, dtype))
    half = (torch.tril if triangle == "L" else torch.triu)(a)
    (values, vectors), expected = run_both("_linalg_eigh", half, triangle)
    check_close(values, expected[0])
    check_close((vectors * values[..., None, :]) @ vectors.conj().swapaxes(-1, -2), a, factor=5)
    check("_linalg_eigh", half, triangle, False)


@quick
@given(BATCHES, st.integers(1, 5), DTYPES)
def test_eig(batch, n, dtype):
    a = matrix(batch, n, n, dtype)
    (values, vectors), _ = run_both("linalg_eig", a)
    check_close(a.numpy() @ vectors, torch.from_numpy(vectors * values[..., None, :]), factor=5)
    for name in ("linalg_eigvals", "_linalg_eigvals"):
        (values,), (expected,) = run_both(name, a)
        # the order is LAPACK's: compare as sets, through the characteristic polynomial's values
        check_close(numpy.sort(abs(values), axis=-1), expected.abs().sort(-1).values, factor=5)


def test_eig_of_what_is_not_finite():
    with pytest.raises(ModelError, match="^linalg_eig: argument `self`: expected finite values"):
        find_kernel("aten::linalg_eig")(numpy.full((2, 2), numpy.inf))


@quick
@given(BATCHES, st.integers(0, 5), st.integers(0, 5), DTYPES, st.sampled_from(["reduced", "complete", "r"]))
def test_qr(batch, m, n, dtype, mode):
    a = matrix(batch, m, n, dtype)
    check("linalg_qr", a, mode, factor=5)


@quick
@given(BATCHES, st.integers(1, 5), st.integers(1, 5), DTYPES, st.booleans())
def test_householder(batch, m, n, dtype, adjoint):
    a = matrix(batch, m, n, dtype)
    check("geqrf", a, factor=5)
    factors, tau = torch.geqrf(a)
    if m >= n:
        check("linalg_householder_product", factors, tau, factor=5)
        check("linalg_householder_product", factors, tau[..., : n - 1], factor=5)
    if dtype in (torch.float32, torch.float64, torch.complex128) and m >= n:
        check("ormqr", factors, tau, matrix(batch, m, 2, dtype), True, adjoint, factor=5)
        check("ormqr", factors, tau, matrix(batch, 2, m, dtype), False, adjoint, factor=5)


@quick
@given(BATCHES, st.integers(1, 5), st.integers(1, 5), DTYPES)
def test_pinv(batch, m, n, dtype):
    a = matrix(batch, m, n, dtype)
    real = a.real.dtype if dtype.is_complex else dtype
    check("linalg_pinv.atol_rtol_tensor", a, factor=50)
    check("linalg_pinv.atol_rtol_tensor", a, rtol=torch.tensor(0.4, dtype=real), factor=50)
    check("linalg_pinv.atol_rtol_tensor", a, atol=torch.tensor(0.7, dtype=real), factor=50)
    square = hermitian(matrix(batch, n, n, dtype))
    check("linalg_pinv.atol_rtol_tensor", square, rtol=torch.tensor(0.1, dtype=real), hermitian=True, factor=50)


def test_pinv_without_elements():
    check("linalg_pinv.atol_rtol_tensor", torch.zeros(2, 0, 3))


@quick
@given(BATCHES, st.integers(0, 5), DTYPES, st.sampled_from([1e-3, 1.0, 8.0]))
def test_matrix_exp(batch, n, dtype, size):
    a = matrix(batch, n, n, dtype) * size
    (actual,), (expected,) = run_both("linalg_matrix_exp", a)
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    check_close(actual / max(largest, 1.0), expected / max(largest, 1.0))


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match="`mode`: expected reduced, complete or r, got 'full'"):
        find_kernel("aten::linalg_qr")(numpy.eye(2), "full")
    with pytest.raises(InvalidArgumentError, match="`UPLO`: expected L or U, got 'X'"):
        find_kernel("aten::_linalg_eigh")(numpy.eye(2), "X")
