"""The kernels that solve linear systems, against PyTorch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check, check_close, run_both, to_numpy

from untorch.runtime.errors import InvalidArgumentError, ModelError, UnsupportedError
from untorch.runtime.kernels.triangular import lu_factor, permutation
from untorch.runtime.registry import find_kernel

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128])
BATCHES = st.sampled_from([(), (3,), (2, 1), (0,)])
LAYOUTS = st.sampled_from(["rows", "columns", "strided"])
quick = settings(max_examples=25, deadline=None)


def matrix(
    batch: tuple[int, ...], m: int, n: int, dtype: torch.dtype, layout: str = "rows", seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if layout == "columns":
        return torch.randn(*batch, n, m, dtype=dtype, generator=generator).mT
    if layout == "strided":
        return torch.randn(*batch, m, 2 * n, dtype=dtype, generator=generator)[..., ::2]
    return torch.randn(*batch, m, n, dtype=dtype, generator=generator)


def good(batch: tuple[int, ...], n: int, dtype: torch.dtype, layout: str = "rows") -> torch.Tensor:
    """A matrix that is far from singular."""
    a = matrix(batch, n, n, dtype, layout)
    return a.add_(3 * n**0.5 * torch.eye(n, dtype=dtype)) if a.numel() else a


def positive(batch: tuple[int, ...], n: int, dtype: torch.dtype) -> torch.Tensor:
    a = matrix(batch, n, n, dtype)
    return a @ a.mH + n * torch.eye(n, dtype=dtype)


@quick
@given(BATCHES, st.integers(0, 5), DTYPES, LAYOUTS)
def test_determinant(batch, n, dtype, layout):
    a = matrix(batch, n, n, dtype, layout)
    check("_linalg_det", a)
    check("_linalg_slogdet", a)


def test_determinant_of_a_singular_matrix():
    check("_linalg_det", torch.zeros(2, 3, 3))
    check("_linalg_slogdet", torch.zeros(2, 3, 3))


@quick
@given(BATCHES, st.integers(1, 5), st.integers(0, 3), DTYPES, LAYOUTS, st.booleans())
def test_solve(batch, n, k, dtype, layout, left):
    b = matrix(batch, n, k, dtype) if left else matrix(batch, k, n, dtype)
    check("_linalg_solve_ex", good(batch, n, dtype, layout), b, left=left)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_solve_for_a_vector(batch):
    check("_linalg_solve_ex", good(batch, 4, torch.float32), torch.randn(*batch, 4))


def test_solve_reports_a_singular_matrix():
    a = torch.eye(3).repeat(2, 1, 1)
    a[1, 2, 2] = 0
    check("linalg_lu_factor_ex", a)
    assert run_both("_linalg_solve_ex", a, torch.ones(2, 3, 1))[0][3].tolist() == [0, 3]
    with pytest.raises(ModelError, match=r"^_linalg_solve_ex: matrix 1 of the batch is singular \(info 3\)$"):
        find_kernel("aten::_linalg_solve_ex")(a.numpy(), numpy.ones((2, 3, 1), "f"), check_errors=True)


@quick
@given(BATCHES, st.integers(0, 5), DTYPES, LAYOUTS)
def test_inverse(batch, n, dtype, layout):
    check("linalg_inv_ex", good(batch, n, dtype, layout))


def test_inverse_of_a_singular_matrix():
    a = torch.eye(3).repeat(2, 1, 1)
    a[1, 1, 1] = 0
    ours, theirs = run_both("linalg_inv_ex", a)
    check_close(ours[0][0], theirs[0][0])
    assert ours[1].tolist() == theirs[1].tolist() == [0, 2]
    with pytest.raises(ModelError, match="linalg_inv_ex: matrix 1 of the batch is singular"):
        find_kernel("aten::linalg_inv_ex")(a.numpy(), check_errors=True)


@quick
@given(BATCHES, st.integers(0, 5), st.integers(0, 5), DTYPES, LAYOUTS)
def test_lu(batch, m, n, dtype, layout):
    a = matrix(batch, m, n, dtype, layout)
    check("linalg_lu_factor_ex", a)
    check("linalg_lu", a)
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    check("lu_unpack", lu, pivots)
    check("lu_unpack", lu, pivots, False, True)
    check("lu_unpack", lu, pivots, True, False)


@pytest.mark.parametrize(("m", "n"), [(100, 100), (130, 70), (40, 90)])
def test_blocked_lu(m, n):
    a = torch.randn(2, m, n, dtype=torch.float64)
    check("linalg_lu_factor_ex", a)
    lu, pivots, _ = lu_factor(a.numpy())
    k = min(m, n)
    product = (numpy.tril(lu[..., :k], -1) + numpy.eye(m, k)) @ numpy.triu(lu[..., :k, :])
    ordered = numpy.take_along_axis(a.numpy(), permutation(pivots, m)[..., None], axis=-2)
    numpy.testing.assert_allclose(product, ordered, atol=1e-12)


@quick
@given(BATCHES, st.integers(1, 5), st.integers(1, 3), DTYPES, st.booleans(), st.booleans())
def test_lu_solve(batch, n, k, dtype, left, adjoint):
    lu, pivots, _ = torch.linalg.lu_factor_ex(good(batch, n, dtype))
    b = matrix(batch, n, k, dtype) if left else matrix(batch, k, n, dtype)
    check("linalg_lu_solve", lu, pivots, b, left=left, adjoint=adjoint)


@quick
@given(BATCHES, st.integers(1, 5), st.integers(1, 3), DTYPES, LAYOUTS, st.booleans(), st.booleans(), st.booleans())
def test_solve_triangular(batch, n, k, dtype, layout, upper, left, unit):
    a = good(batch, n, dtype, layout)
    b = matrix(batch, n, k, dtype) if left else matrix(batch, k, n, dtype)
    check("linalg_solve_triangular", a, b, upper=upper, left=left, unitriangular=unit, factor=20 if unit else 1)
    if left:
        check("triangular_solve", b, a, upper, False, unit, factor=20 if unit else 1)
        if not dtype.is_complex:
            check("triangular_solve", b, a, upper, True, unit, factor=20 if unit else 1)


def test_triangular_system_with_a_zero_on_the_diagonal():
    check("linalg_solve_triangular", torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2, 1), upper=True)


@quick
@given(BATCHES, st.integers(0, 5), DTYPES, st.booleans())
def test_cholesky(batch, n, dtype, upper):
    a = positive(batch, n, dtype)
    check("linalg_cholesky_ex", a, upper=upper)
    if n > 0:
        factor = torch.linalg.cholesky(a, upper=upper)
        check("cholesky", a, upper)
        check("cholesky_inverse", factor, upper)
        check("cholesky_solve", matrix(batch, n, 2, dtype), factor, upper)


def test_cholesky_of_an_indefinite_matrix():
    a = torch.eye(4).repeat(3, 1, 1)
    a[1, 2, 2] = -1
    ours, theirs = run_both("linalg_cholesky_ex", a)
    assert ours[1].tolist() == theirs[1].tolist() == [0, 3, 0]
    check_close(ours[0][0], theirs[0][0])
    with pytest.raises(ModelError, match=r"matrix 1 of the batch is not positive definite \(info 3\)"):
        find_kernel("aten::cholesky")(a.numpy())


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss", None])
@pytest.mark.parametrize(("m", "n"), [(5, 3), (3, 3), (3, 5)])
def test_least_squares(driver, m, n):
    a, b = matrix((2,), m, n, torch.float64), matrix((2,), m, 2, torch.float64, seed=1)
    expected = torch.ops.aten.linalg_lstsq(a, b, driver=driver)
    actual = find_kernel("aten::linalg_lstsq")(a.numpy(), b.numpy(), driver=driver)
    for ours, theirs in zip(actual, expected, strict=True):
        check_close(ours, theirs)


@quick
@given(st.sampled_from([(3,), (2, 3), (3, 4), (1, 3)]), st.sampled_from([torch.float32, torch.int64, torch.complex64]))
def test_cross(shape, dtype):
    a = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    check("linalg_cross", a, a.flip(0) * 2, dim=shape.index(3))


def test_check_errors():
    find_kernel("aten::_linalg_check_errors")(numpy.zeros(3, numpy.int32), "linalg.inv", is_matrix=False)
    with pytest.raises(ModelError, match="^linalg.inv: matrix 1 of the batch could not be factored"):
        find_kernel("aten::_linalg_check_errors")(numpy.array([0, 2]), "linalg.inv", is_matrix=False)


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match=r"`A`: expected a batch of square matrices, got the shape \(2, 3\)"):
        find_kernel("aten::_linalg_det")(numpy.zeros((2, 3), "f"))
    with pytest.raises(UnsupportedError, match="`A`: expected float32, float64, complex64 or complex128, got float16"):
        find_kernel("aten::linalg_inv_ex")(to_numpy(torch.zeros(2, 2, dtype=torch.float16)))
    with pytest.raises(UnsupportedError, match="LU without pivoting does not exist on the CPU"):
        find_kernel("aten::linalg_lu")(numpy.eye(2), pivot=False)
    with pytest.raises(InvalidArgumentError, match="3 elements along dimension -1"):
        find_kernel("aten::linalg_cross")(numpy.zeros(4), numpy.zeros(4))
    with pytest.raises(InvalidArgumentError, match="`driver`: expected gels, gelsy, gelsd or gelss, got 'fast'"):
        find_kernel("aten::linalg_lstsq")(numpy.eye(2), numpy.eye(2), driver="fast")
