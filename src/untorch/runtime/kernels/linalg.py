"""Solving linear systems: LU, inverses, determinants, triangular and Cholesky systems, least squares."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError, ModelError, UnsupportedError
from untorch.runtime.kernels import triangular
from untorch.runtime.kernels.arrays import (
    Array,
    axis_of,
    check_inexact,
    check_matrix,
    check_square,
    column_major,
    empty_like,
    kernel,
    row_major,
)

KERNELS: dict[str, Callable[..., Any]] = {}


def check_info(operator: str, info: Array, what: str) -> None:
    """Raise when a factorisation of the batch failed, naming the first matrix of the batch and LAPACK's number."""
    if numpy.any(info != 0):
        item = int(numpy.flatnonzero(info)[0])
        raise ModelError(f"{operator}: matrix {item} of the batch {what} (info {int(info.reshape(-1)[item])})")


def _factor_for_determinant(a: Array) -> tuple[Array, Array]:
    """LU of ``a``, or of its transpose when it is stored by rows: PyTorch does so, and its result is visible."""
    transposed = bool(a.flags.c_contiguous) and not numpy.iscomplexobj(a)
    lu, pivots, _ = triangular.lu_factor(a.swapaxes(-1, -2) if transposed else a)
    return lu, pivots


def _determinant_parts(lu: Array, pivots: Array) -> tuple[Array, Array]:
    """The diagonal of U and the sign (…) of the row permutation."""
    swaps = (pivots != numpy.arange(1, pivots.shape[-1] + 1)).sum(axis=-1)
    sign = numpy.where(swaps % 2, -1, 1).astype(lu.dtype)
    return numpy.diagonal(lu, axis1=-2, axis2=-1), sign


@kernel(KERNELS, "_linalg_det")
def linalg_det(A: Array) -> tuple[Array, Array, Array]:
    check_inexact("_linalg_det", "A", A)
    check_square("_linalg_det", "A", A)
    lu, pivots = _factor_for_determinant(A)
    diagonal, sign = _determinant_parts(lu, pivots)
    result = numpy.asarray(sign * diagonal.prod(axis=-1), A.dtype)
    return result, column_major(lu), pivots


@kernel(KERNELS, "_linalg_slogdet")
def linalg_slogdet(A: Array) -> tuple[Array, Array, Array, Array]:
    check_inexact("_linalg_slogdet", "A", A)
    check_square("_linalg_slogdet", "A", A)
    lu, pivots = _factor_for_determinant(A)
    diagonal, sign = _determinant_parts(lu, pivots)
    size = abs(diagonal)
    units = numpy.where(size == 0, 0, diagonal / size)
    log_size = numpy.log(size).sum(axis=-1)
    return numpy.asarray(sign * units.prod(axis=-1), A.dtype), numpy.asarray(log_size), column_major(lu), pivots


@kernel(KERNELS, "_linalg_solve_ex")
def linalg_solve_ex(
    A: Array,
    B: Array,
    *,
    left: bool = True,
    check_errors: bool = False,
) -> tuple[Array, Array, Array, Array]:
    check_inexact("_linalg_solve_ex", "A", A)
    check_square("_linalg_solve_ex", "A", A)
    # PyTorch's rule: B is a batch of vectors when it has one axis or the shape of A without its last axis.
    is_vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    right = B[..., None] if is_vector else B
    if is_vector and not left:
        raise InvalidArgumentError("_linalg_solve_ex: argument `left`: expected True when `B` holds vectors, got False")
    lu, pivots, info = triangular.lu_factor(A)
    if check_errors:
        check_info("_linalg_solve_ex", info, "is singular")
    result = _lu_solve(lu, pivots, right, left)
    if is_vector:
        result = result[..., 0]
    return column_major(result) if left else row_major(result), column_major(lu), pivots, info


def _lu_solve(lu: Array, pivots: Array, b: Array, left: bool, adjoint: bool = False) -> Array:
    """x with A x = b, or x A = b, from the factors of A; with ``adjoint`` A stands for its adjoint."""
    if left:
        return triangular.lu_solve(lu, pivots, b, adjoint)
    # x A = b is A^H x^H = b^H
    adjoint_b = b.conj().swapaxes(-1, -2)
    solution = triangular.lu_solve(lu, pivots, adjoint_b, not adjoint)
    return numpy.asarray(solution.conj().swapaxes(-1, -2))


@kernel(KERNELS, "linalg_inv_ex")
def linalg_inv_ex(A: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    check_inexact("linalg_inv_ex", "A", A)
    check_square("linalg_inv_ex", "A", A)
    try:
        # LAPACK's own inverse; it says only that some matrix of the batch was singular.
        return column_major(numpy.linalg.inv(A)), numpy.zeros(A.shape[:-2], numpy.int32)
    except numpy.linalg.LinAlgError:
        lu, pivots, info = triangular.lu_factor(A)
    if check_errors:
        check_info("linalg_inv_ex", info, "is singular")
    identity = numpy.eye(A.shape[-1], dtype=A.dtype)
    return column_major(triangular.lu_solve(lu, pivots, identity)), info


@kernel(KERNELS, "linalg_lu_factor_ex")
def linalg_lu_factor_ex(
    A: Array,
    *,
    pivot: bool = True,
    check_errors: bool = False,
) -> tuple[Array, Array, Array]:
    check_inexact("linalg_lu_factor_ex", "A", A)
    check_matrix("linalg_lu_factor_ex", "A", A)
    _check_pivot("linalg_lu_factor_ex", pivot)
    lu, pivots, info = triangular.lu_factor(A)
    if check_errors:
        check_info("linalg_lu_factor_ex", info, "is singular")
    return column_major(lu), pivots, info


@kernel(KERNELS, "linalg_lu")
def linalg_lu(A: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    check_inexact("linalg_lu", "A", A)
    check_matrix("linalg_lu", "A", A)
    _check_pivot("linalg_lu", pivot)
    lu, pivots, _ = triangular.lu_factor(A)
    return lu_unpack(lu, pivots)


def _check_pivot(operator: str, pivot: bool) -> None:
    if not pivot:
        raise UnsupportedError(
            f"{operator}: argument `pivot`: expected True, got False; LU without pivoting does not exist on the CPU"
        )


@kernel(KERNELS, "lu_unpack")
def lu_unpack(
    LU_data: Array,
    LU_pivots: Array,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Array, Array, Array]:
    m, n = LU_data.shape[-2:]
    k = min(m, n)
    p = lower = upper = empty_like(LU_data)
    if unpack_data:
        lower = row_major(numpy.tril(LU_data[..., :, :k], -1) + numpy.eye(m, k, dtype=LU_data.dtype))
        upper = row_major(numpy.triu(LU_data[..., :k, :]))
    if unpack_pivots:
        order = triangular.permutation(LU_pivots, m)
        # A = P L U with A[order] = L U: column i of P has its one in the row order[i].
        p = row_major((numpy.arange(m)[:, None] == order[..., None, :]).astype(LU_data.dtype))
    return p, lower, upper


@kernel(KERNELS, "linalg_lu_solve")
def linalg_lu_solve(
    LU: Array,
    pivots: Array,
    B: Array,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Array:
    check_inexact("linalg_lu_solve", "LU", LU)
    check_square("linalg_lu_solve", "LU", LU)
    solution = _lu_solve(LU, pivots, B, left, adjoint)
    return column_major(solution) if left else row_major(solution)


@kernel(KERNELS, "linalg_solve_triangular")
def linalg_solve_triangular(
    self: Array,
    B: Array,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Array:
    check_inexact("linalg_solve_triangular", "self", self)
    check_square("linalg_solve_triangular", "self", self)
    if left:
        return column_major(triangular.solve(self, B, upper, unitriangular))
    solution = triangular.solve(self.swapaxes(-1, -2), B.swapaxes(-1, -2), not upper, unitriangular)
    return column_major(solution.swapaxes(-1, -2))


@kernel(KERNELS, "triangular_solve")
def triangular_solve(
    self: Array,
    A: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Array, Array]:
    check_inexact("triangular_solve", "A", A)
    check_square("triangular_solve", "A", A)
    matrix = A.swapaxes(-1, -2) if transpose else A
    solution = triangular.solve(matrix, self, upper != transpose, unitriangular)
    batch = solution.shape[:-2]
    return column_major(solution), column_major(numpy.broadcast_to(A, (*batch, *A.shape[-2:])))


@kernel(KERNELS, "linalg_cholesky_ex")
def linalg_cholesky_ex(self: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    check_inexact("linalg_cholesky_ex", "self", self)
    check_square("linalg_cholesky_ex", "self", self)
    source = self.conj().swapaxes(-1, -2) if upper else self  # the other triangle is not read
    try:
        factor, info = numpy.linalg.cholesky(source), numpy.zeros(self.shape[:-2], numpy.int32)
    except numpy.linalg.LinAlgError:
        factor, info = _cholesky_each(source)
    if check_errors:
        check_info("linalg_cholesky_ex", info, "is not positive definite")
    return column_major(factor.conj().swapaxes(-1, -2) if upper else factor), info


def _cholesky_each(a: Array) -> tuple[Array, Array]:
    """Matrix by matrix, with the order of the first leading minor that is not positive definite in info."""
    n = a.shape[-1]
    flat = a.reshape(math.prod(a.shape[:-2]), n, n)
    factors, info = numpy.tril(flat), numpy.zeros(flat.shape[0], numpy.int32)
    for item, matrix in enumerate(flat):
        good, bad = 0, n + 1  # bisection: a minor that fails makes every larger one fail
        while bad - good > 1:
            order = (good + bad) // 2
            try:
                factors[item, :order, :order] = numpy.linalg.cholesky(matrix[:order, :order])
                good = order
            except numpy.linalg.LinAlgError:
                bad = order
        info[item] = bad if bad <= n else 0
    return factors.reshape(a.shape), info.reshape(a.shape[:-2])


@kernel(KERNELS, "cholesky")
def cholesky(self: Array, upper: bool = False) -> Array:
    return linalg_cholesky_ex(self, upper=upper, check_errors=True)[0]


@kernel(KERNELS, "cholesky_solve", "_cholesky_solve_helper")
def cholesky_solve(self: Array, input2: Array, upper: bool = False) -> Array:
    check_inexact("cholesky_solve", "input2", input2)
    check_square("cholesky_solve", "input2", input2)
    adjoint = input2.conj().swapaxes(-1, -2)
    first, second = (adjoint, input2) if upper else (input2, adjoint)
    return column_major(triangular.solve_upper(second, triangular.solve_lower(first, self)))


@kernel(KERNELS, "cholesky_inverse")
def cholesky_inverse(self: Array, upper: bool = False) -> Array:
    return cholesky_solve(numpy.eye(self.shape[-1], dtype=self.dtype), self, upper)


@kernel(KERNELS, "_linalg_check_errors")
def linalg_check_errors(info: Array, api_name: str, *, is_matrix: bool) -> None:
    """The check that eager mode does on the host after a factorisation."""
    del is_matrix
    check_info(api_name, info, "could not be factored: it is singular or not positive definite")


@kernel(KERNELS, "linalg_lstsq")
def linalg_lstsq(
    self: Array,
    b: Array,
    rcond: float | None = None,
    *,
    driver: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Least squares through the SVD for every driver: where the solution is unique, all drivers give it."""
    check_inexact("linalg_lstsq", "self", self)
    check_matrix("linalg_lstsq", "self", self)
    name = driver or "gelsy"
    if name not in ("gels", "gelsy", "gelsd", "gelss"):
        raise InvalidArgumentError(
            f"linalg_lstsq: argument `driver`: expected gels, gelsy, gelsd or gelss, got {driver!r}"
        )
    is_vector = self.ndim - 1 == b.ndim and b.shape == self.shape[:-1]
    right = b[..., None] if is_vector else b
    m, n = self.shape[-2:]
    u, s, vh = numpy.linalg.svd(self, full_matrices=False)
    tolerance = numpy.finfo(s.dtype).eps * max(m, n) if rcond is None else rcond
    if name == "gels":
        tolerance = 0.0  # that driver assumes full rank
    largest = s.max(axis=-1, keepdims=True, initial=0)
    kept = s > tolerance * largest
    inverse = numpy.divide(1, s, out=numpy.zeros_like(s), where=kept)
    solution = vh.conj().swapaxes(-1, -2) @ (inverse[..., None] * (u.conj().swapaxes(-1, -2) @ right))
    rank = kept.sum(axis=-1)
    residuals = empty_like(s)
    if m > n and name != "gelsy" and bool(numpy.all(rank == n)):
        residuals = numpy.asarray((abs(self @ solution - right) ** 2).sum(axis=-2))
    ranks = empty_like(s, numpy.int64) if name == "gels" else numpy.asarray(rank, numpy.int64)
    values = row_major(s) if name in ("gelsd", "gelss") else empty_like(s)
    return column_major(solution[..., 0] if is_vector else solution), residuals, ranks, values


@kernel(KERNELS, "linalg_cross")
def linalg_cross(self: Array, other: Array, *, dim: int = -1) -> Array:
    axis = axis_of("linalg_cross", dim, self.ndim)
    if self.ndim != other.ndim or self.shape[axis] != 3 or other.shape[axis] != 3:
        raise InvalidArgumentError(
            f"linalg_cross: expected two tensors with as many dimensions and 3 elements along dimension {dim}, got "
            f"the shapes {self.shape} and {other.shape}"
        )
    a, b = numpy.broadcast_arrays(self, other)
    a0, a1, a2 = (a.take(i, axis) for i in range(3))
    b0, b1, b2 = (b.take(i, axis) for i in range(3))
    return numpy.stack((a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0), axis)
