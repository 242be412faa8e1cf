"""LAPACK's operators: values against eager PyTorch, shapes, column-major strides, broadcasting and error texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from shim import ShimError, call

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
TOLERANCE = {torch.float32: 2e-4, torch.complex64: 2e-4, torch.float64: 1e-10, torch.complex128: 1e-10}
SIZES = [0, 1, 2, 3, 5, 16, 63, 64, 65, 130]
BATCHES: list[tuple[int, ...]] = [(), (1,), (2,), (5,), (2, 3), (0,)]
FLAGS = [False, True]


def agree(got: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Same dtype, shape and strides, and values within the tolerance of the largest one."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    if expected.numel() == 0:
        return
    largest = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[got.dtype] * scale * largest)


def random(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "rows") -> torch.Tensor:
    """Normal values stored by rows, by columns, or with gaps."""
    if layout == "columns" and len(shape) > 1:
        return torch.randn((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT
    if layout == "gaps":
        return torch.randn((*shape, 2), dtype=dtype)[..., 1]
    return torch.randn(shape, dtype=dtype)


def triangle(batch: tuple[int, ...], n: int, dtype: torch.dtype, layout: str = "rows") -> torch.Tensor:
    """Well-conditioned whichever triangle is read, with values in the other one; a real diagonal, as Cholesky's is."""
    a = random((*batch, n, n), dtype, layout).mul_(0.5 / max(n, 1)).add_(torch.eye(n, dtype=dtype))
    a.diagonal(dim1=-2, dim2=-1).copy_(a.diagonal(dim1=-2, dim2=-1).real.clone())
    return a


def triangular_solve(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager's, without the warning that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(torch.triangular_solve(*args))  # type: ignore[arg-type, return-value]


layouts = st.sampled_from(["rows", "columns", "gaps"])
dtypes = st.sampled_from(DTYPES)
sizes = st.sampled_from(SIZES)
flags = st.booleans()
batches = st.sampled_from(BATCHES)


@settings(max_examples=60, deadline=None)
@given(dtypes, sizes, batches, layouts, flags)
def test_cholesky_inverse(dtype: torch.dtype, n: int, batch: tuple[int, ...], layout: str, upper: bool) -> None:
    factor = triangle(batch, n, dtype, layout)
    got = call("aoti_torch_cpu_cholesky_inverse", factor, upper, returns=1)
    agree(got, torch.cholesky_inverse(factor, upper))
    assert torch.equal(got, got.mH)


@settings(max_examples=60, deadline=None)
@given(dtypes, sizes, st.integers(0, 4), batches, flags, flags, layouts, layouts, flags)
def test_cholesky_solve(
    dtype: torch.dtype, n: int, columns: int, batch: tuple[int, ...], broadcast_b: bool, broadcast_a: bool,
    layout_b: str, layout_a: str, upper: bool,
) -> None:  # fmt: skip
    b = random((*(() if broadcast_b else batch), n, columns), dtype, layout_b)
    a = triangle(() if broadcast_a else batch, n, dtype, layout_a)
    got = call("aoti_torch_cpu_cholesky_solve", b, a, upper, returns=1)
    agree(got, torch.cholesky_solve(b, a, upper))


@settings(max_examples=80, deadline=None)
@given(dtypes, sizes, st.integers(0, 4), batches, flags, flags, layouts, layouts, flags, flags, flags)
def test_triangular_solve(
    dtype: torch.dtype, n: int, columns: int, batch: tuple[int, ...], broadcast_b: bool, broadcast_a: bool,
    layout_b: str, layout_a: str, upper: bool, transpose: bool, unit: bool,
) -> None:  # fmt: skip
    b = random((*(() if broadcast_b else batch), n, columns), dtype, layout_b)
    a = triangle(() if broadcast_a else batch, n, dtype, layout_a)
    got = call("aoti_torch_cpu_triangular_solve", b, a, upper, transpose, unit, returns=2)
    expected = triangular_solve(b, a, upper, transpose, unit)
    agree(got[0], expected[0])
    agree(got[1], expected[1])
    assert torch.equal(got[1], expected[1])


@settings(max_examples=60, deadline=None)
@given(dtypes, sizes, sizes, batches, layouts)
def test_geqrf(dtype: torch.dtype, m: int, n: int, batch: tuple[int, ...], layout: str) -> None:
    a = random((*batch, m, n), dtype, layout)
    factors, tau = call("aoti_torch_cpu_geqrf", a, returns=2)
    expected = torch.geqrf(a)
    if dtype.is_complex and m <= n and m > 0:
        # The last row needs no reflection. LAPACK turns its first value real nevertheless, MKL does so in small matrices.
        k = m - 1
        assert (factors.shape, factors.stride()) == (expected[0].shape, expected[0].stride())
        torch.testing.assert_close(factors[..., :k, :], expected[0][..., :k, :], rtol=0, atol=20 * TOLERANCE[dtype])
        torch.testing.assert_close(tau[..., :k], expected[1][..., :k], rtol=0, atol=20 * TOLERANCE[dtype])
    else:
        # Row i of R and vector i carry the rounding of the reflections before them.
        agree(factors, expected[0], scale=20)
        agree(tau, expected[1], scale=20)
    if m >= n:
        q = torch.linalg.householder_product(factors, tau)
        torch.testing.assert_close(q @ factors[..., :n, :].triu(), a, rtol=0, atol=10 * TOLERANCE[dtype])


@settings(max_examples=60, deadline=None)
@given(dtypes, sizes.filter(bool), sizes, st.integers(0, 4), batches, layouts, layouts, flags, flags)
def test_ormqr(
    dtype: torch.dtype, m: int, n: int, others: int, batch: tuple[int, ...], layout: str, layout_other: str,
    left: bool, transpose: bool,
) -> None:  # fmt: skip
    raw, tau = torch.geqrf(random((*batch, m, n), dtype))
    vectors = random(tuple(raw.shape), dtype, layout).copy_(raw)
    other = random((*batch, m, others) if left else (*batch, others, m), dtype, layout_other)
    got = call("aoti_torch_cpu_ormqr", vectors, tau, other, left, transpose, returns=1)
    q = torch.linalg.householder_product(
        torch.cat([raw, torch.zeros(*batch, m, max(m - n, 0), dtype=dtype)], -1)[..., :m],
        torch.cat([tau, torch.zeros(*batch, m - tau.shape[-1], dtype=dtype)], -1),
    )
    q = q.mH if transpose else q
    product = q @ other if left else other @ q
    agree(got, torch.empty((*batch, product.shape[-1], product.shape[-2]), dtype=dtype).mT.copy_(product), scale=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", FLAGS)
@pytest.mark.parametrize("transpose", FLAGS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_ormqr_as_eager(dtype: torch.dtype, left: bool, transpose: bool, batch: tuple[int, ...]) -> None:
    vectors, tau = torch.geqrf(random((*batch, 7, 4), dtype))
    other = random((*batch, 7, 5) if left else (*batch, 5, 7), dtype)
    got = call("aoti_torch_cpu_ormqr", vectors, tau, other, left, transpose, returns=1)
    agree(got, torch.ormqr(vectors, tau, other, left, transpose))


@settings(max_examples=60, deadline=None)
@given(dtypes, st.integers(0, 6), st.integers(0, 6), batches, layouts, flags, flags)
def test_lu_unpack(
    dtype: torch.dtype, m: int, n: int, batch: tuple[int, ...], layout: str, data: bool, pivots: bool
) -> None:
    lu = random((*batch, m, n), dtype, layout)
    swaps = torch.randint(1, max(m, 1) + 1, (*batch, min(m, n)), dtype=torch.int32)
    got = call("aoti_torch_cpu_lu_unpack", lu, swaps, data, pivots, returns=3)
    for ours, eager in zip(got, torch.lu_unpack(lu, swaps, data, pivots), strict=True):
        agree(ours, eager)
        assert torch.equal(ours, eager)


def test_lu_unpack_takes_strided_pivots() -> None:
    lu, swaps = torch.linalg.lu_factor(torch.randn(4, 4))
    strided = torch.stack([swaps, swaps], -1)[:, 0]
    assert not strided.is_contiguous()
    got = call("aoti_torch_cpu_lu_unpack", lu, strided, True, True, returns=3)
    for ours, eager in zip(got, torch.lu_unpack(lu, swaps), strict=True):
        agree(ours, eager)


@pytest.mark.parametrize("shape", [(70, 64), (64, 70), (200, 97), (97, 200), (3, 100, 65)])
def test_reflections_in_panels(shape: tuple[int, ...]) -> None:
    a = torch.randn(shape, dtype=torch.float64)
    factors, tau = call("aoti_torch_cpu_geqrf", a, returns=2)
    expected = torch.geqrf(a)
    agree(factors, expected[0])
    agree(tau, expected[1])
    for left in FLAGS:
        for transpose in FLAGS:
            other = torch.randn((*shape[:-1], 80) if left else (*shape[:-2], 80, shape[-2]), dtype=torch.float64)
            got = call("aoti_torch_cpu_ormqr", factors, tau, other, left, transpose, returns=1)
            agree(got, torch.ormqr(*expected, other, left, transpose))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_large_single_matrices_use_threads(dtype: torch.dtype) -> None:
    a, b = triangle((), 300, dtype), random((300, 90), dtype)
    agree(call("aoti_torch_cpu_triangular_solve", b, a, True, True, False, returns=2)[0],
          triangular_solve(b, a, True, True, False)[0])  # fmt: skip
    agree(call("aoti_torch_cpu_cholesky_solve", b, a, False, returns=1), torch.cholesky_solve(b, a))
    tall = random((300, 120), dtype)
    factors, tau = call("aoti_torch_cpu_geqrf", tall, returns=2)
    agree(factors, torch.geqrf(tall)[0])
    agree(
        call("aoti_torch_cpu_ormqr", factors, tau, b, True, True, returns=1), torch.ormqr(factors, tau, b, True, True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_geqrf_scales(dtype: torch.dtype) -> None:
    # Squares of these overflow or vanish.
    for scale in (1e30, 1e-30):
        a = torch.randn(6, 4, dtype=dtype) * scale
        factors, tau = call("aoti_torch_cpu_geqrf", a, returns=2)
        expected = torch.geqrf(a)
        torch.testing.assert_close(tau, expected[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(factors.triu() / scale, expected[0].triu() / scale, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(factors.tril(-1), expected[0].tril(-1), rtol=1e-4, atol=1e-5)


def test_geqrf_of_zeros_and_of_a_triangle_does_nothing() -> None:
    for a in (torch.zeros(4, 3), torch.randn(4, 3).triu()):
        factors, tau = call("aoti_torch_cpu_geqrf", a, returns=2)
        assert torch.equal(factors, a)
        assert torch.equal(tau, torch.zeros(3))


def test_zeros_on_the_diagonal_divide() -> None:
    got = call("aoti_torch_cpu_triangular_solve", torch.ones(3, 1), torch.zeros(3, 3), True, False, False, returns=2)[0]
    assert torch.isinf(got[2, 0])
    assert torch.isnan(got[:2]).all()


def test_a_singular_factor_has_no_inverse() -> None:
    factor = torch.eye(3).repeat(2, 1, 1)
    factor[1, 1, 1] = 0
    text = "cholesky_inverse: matrix 1 of the batch is singular: diagonal element 2 of its factor is zero"
    with pytest.raises(ShimError, match=text):
        call("aoti_torch_cpu_cholesky_inverse", factor, False, returns=1)
    with pytest.raises(RuntimeError):
        torch.cholesky_inverse(factor)


def test_an_exception_from_a_parallel_batch_is_an_error() -> None:
    factor = torch.eye(40).repeat(16, 1, 1)
    factor[11, 3, 3] = 0
    with pytest.raises(ShimError, match="matrix 11 of the batch is singular: diagonal element 4"):
        call("aoti_torch_cpu_cholesky_inverse", factor, False, returns=1)


F, D, H = torch.float32, torch.float64, torch.float16


def zeros(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


ERRORS: list[tuple[str, int, Callable[[], tuple[object, ...]], str]] = [
    ("cholesky_inverse", 1, lambda: (zeros(3), False),
     r"argument 'self' must have at least 2 dimensions, got shape \[3\]"),
    ("cholesky_inverse", 1, lambda: (zeros(2, 3), False),
     r"argument 'self' must be a batch of square matrices, got shape \[2, 3\]"),
    ("cholesky_inverse", 1, lambda: (zeros(2, 2, dtype=H), False),
     "argument 'self' must be float32, float64, complex64 or complex128, got float16; convert it in the model"),
    ("cholesky_solve", 1, lambda: (zeros(3), zeros(3, 3), False), "argument 'self' must have at least 2 dimensions"),
    ("cholesky_solve", 1, lambda: (zeros(3, 1), zeros(3, 2), False), "argument 'input2' must be a batch of square"),
    ("cholesky_solve", 1, lambda: (zeros(3, 1), zeros(3, 3, dtype=D), False),
     "argument 'input2' must be float32, got float64"),
    ("cholesky_solve", 1, lambda: (zeros(4, 1), zeros(3, 3), False),
     r"argument 'self' of shape \[4, 1\] must have 3 rows, as 'input2' has"),
    ("cholesky_solve", 1, lambda: (zeros(2, 3, 1), zeros(4, 3, 3), False),
     r"the batches of 'self' of shape \[2, 3, 1\] and 'input2' of shape \[4, 3, 3\] do not broadcast"),
    ("triangular_solve", 2, lambda: (zeros(3), zeros(3, 3), True, False, False),
     "argument 'self' must have at least 2 dimensions"),
    ("triangular_solve", 2, lambda: (zeros(3, 1), zeros(3, 4), True, False, False),
     "argument 'A' must be a batch of square matrices"),
    ("triangular_solve", 2, lambda: (zeros(3, 1), zeros(3, 3, dtype=D), True, False, False),
     "argument 'A' must be float32, got float64"),
    ("triangular_solve", 2, lambda: (zeros(4, 1), zeros(3, 3), True, False, False),
     r"argument 'self' of shape \[4, 1\] must have 3 rows, as 'A' has"),
    ("triangular_solve", 2, lambda: (zeros(2, 3, 1), zeros(4, 3, 3), True, False, False), "do not broadcast"),
    ("triangular_solve", 2, lambda: (zeros(3, 1, dtype=H), zeros(3, 3, dtype=H), True, False, False),
     "argument 'self' must be float32, float64, complex64 or complex128, got float16"),
    ("geqrf", 2, lambda: (zeros(3),), "argument 'self' must have at least 2 dimensions"),
    ("geqrf", 2, lambda: (int32(3, 3),), "argument 'self' must be float32, float64, complex64 or complex128, got int32"),
    ("ormqr", 1, lambda: (zeros(4), zeros(3), zeros(4, 2), True, False), "argument 'self' must have at least 2"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(3), zeros(4), True, False), "argument 'input3' must have at least 2"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(1, 3), zeros(4, 2), True, False),
     r"argument 'input2' must have one dimension less than 'self', got shapes \[1, 3\] and \[4, 3\]"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(3), zeros(2, 4, 2), True, False),
     r"argument 'input3' must have as many dimensions as 'self', got shapes \[2, 4, 2\] and \[4, 3\]"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(3, dtype=D), zeros(4, 2), True, False),
     "argument 'input2' must be float32, got float64"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(3), zeros(4, 2, dtype=D), True, False),
     "argument 'input3' must be float32, got float64"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(3), zeros(3, 2), True, False),
     r"argument 'input3' of shape \[3, 2\] must have 4 rows, as many as 'self' has rows"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(3), zeros(4, 2), False, False),
     r"argument 'input3' of shape \[4, 2\] must have 4 columns, as many as 'self' has rows"),
    ("ormqr", 1, lambda: (zeros(4, 3), zeros(4), zeros(4, 2), True, False),
     r"argument 'input2' of shape \[4\] has more factors than 'self' of shape \[4, 3\] has reflections"),
    ("ormqr", 1, lambda: (zeros(2, 4, 3), zeros(2, 3), zeros(3, 4, 2), True, False),
     "the batches of 'self', 'input2' and 'input3' differ"),
    ("lu_unpack", 3, lambda: (zeros(3), int32(3), True, True), "argument 'LU_data' must have at least 2 dimensions"),
    ("lu_unpack", 3, lambda: (zeros(3, 3), zeros(3), True, True), "argument 'LU_pivots' must be int32, got float32"),
    ("lu_unpack", 3, lambda: (zeros(3, 3), int32(2), True, True),
     r"argument 'LU_pivots' must have shape \[3\], got \[2\]"),
    ("lu_unpack", 3, lambda: (zeros(3, 3), int32(3) * 4, True, True),
     "argument 'LU_pivots' must hold rows from 1 to 3, got 4 at position 0 of matrix 0; pass the pivots of lu_factor"),
    ("lu_unpack", 3, lambda: (zeros(3, 3, dtype=H), int32(3), True, True), "argument 'LU_data' must be float32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "returns", "arguments", "text"), ERRORS)
def test_errors(name: str, returns: int, arguments: Callable[[], tuple[object, ...]], text: str) -> None:
    with pytest.raises(ShimError, match=f"^{name}: .*{text}"):
        call(f"aoti_torch_cpu_{name}", *arguments(), returns=returns)
