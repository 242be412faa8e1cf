"""LDL factors of symmetric and Hermitian matrices with the pivoting of Bunch and Kaufman, and solving with them.

Stored as LAPACK's sytrf and hetrf store the lower triangle: blocks of D of one or two rows on the diagonal, the columns
of L below them. A positive pivot p at k says that rows k and p - 1 were exchanged and D has one row there; two equal
negative pivots -p at k and k + 1 that rows k + 1 and p - 1 were, and D has two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.kernels.arrays import Array, check_inexact, check_square, column_major, kernel
from untorch.runtime.kernels.linalg import check_info

KERNELS: dict[str, Callable[..., Any]] = {}

# Bounds the growth of the elements equally for one and for two rows.
_ALPHA = (1 + math.sqrt(17)) / 8


def _size(values: Array) -> Array:
    return numpy.asarray(abs(values.real) + abs(values.imag))


def _choose(a: Array, k: int, hermitian: bool) -> tuple[int, int, bool]:
    """The row to exchange, the number of rows of the next block, and whether the column is zero."""
    n = a.shape[0]
    diagonal = float(abs(a[k, k].real) if hermitian else _size(a[k, k]))
    if k == n - 1:
        return k, 1, diagonal == 0
    below = _size(a[k + 1 :, k])
    row = k + 1 + int(below.argmax())
    column_size = float(below.max())
    if max(diagonal, column_size) == 0 or math.isnan(diagonal):
        return k, 1, True
    if diagonal >= _ALPHA * column_size:
        return k, 1, False
    row_size = float(_size(a[row, k:row]).max())
    if row < n - 1:
        row_size = max(row_size, float(_size(a[row + 1 :, row]).max()))
    if diagonal >= _ALPHA * column_size * (column_size / row_size):
        return k, 1, False
    other = float(abs(a[row, row].real) if hermitian else _size(a[row, row]))
    return (row, 1, False) if other >= _ALPHA * row_size else (row, 2, False)


def _exchange(a: Array, k: int, kk: int, kp: int, hermitian: bool) -> None:
    """Exchange rows and columns kk and kp of what is left of the symmetric matrix, in the lower triangle."""
    a[kp + 1 :, [kk, kp]] = a[kp + 1 :, [kp, kk]]
    between = a[kk + 1 : kp, kk].copy()
    a[kk + 1 : kp, kk] = a[kp, kk + 1 : kp].conj() if hermitian else a[kp, kk + 1 : kp]
    a[kp, kk + 1 : kp] = between.conj() if hermitian else between
    if hermitian:
        a[kp, kk] = a[kp, kk].conj()
    a[kk, kk], a[kp, kp] = a[kp, kp], a[kk, kk]
    if kk > k:
        a[kk, k], a[kp, k] = a[kp, k], a[kk, k]


def _block(a: Array, k: int, rows: int, hermitian: bool) -> Array:
    """The block of D at k, whole."""
    block = numpy.tril(a[k : k + rows, k : k + rows])
    strict = numpy.tril(block, -1)
    if hermitian:
        return numpy.asarray(block + strict.conj().T)
    return numpy.asarray(block + strict.T)


def _factor(a: Array, hermitian: bool) -> tuple[Array, int]:
    """Factor one matrix (n, n) in its lower triangle, in place: pivots and info."""
    n = a.shape[0]
    pivots, info, k = numpy.zeros(n, numpy.int32), 0, 0
    if hermitian:
        numpy.fill_diagonal(a, a.diagonal().real)
    while k < n:
        kp, rows, zero = _choose(a, k, hermitian)
        kk = k + rows - 1
        if zero:
            info = info or k + 1
        else:
            if kp != kk:
                _exchange(a, k, kk, kp, hermitian)
            rest, block = slice(k + rows, n), slice(k, k + rows)
            columns = a[rest, block].copy()
            factors = columns @ numpy.linalg.inv(_block(a, k, rows, hermitian))
            update = factors @ (columns.conj().T if hermitian else columns.T)
            lower = numpy.tri(n - k - rows, dtype=numpy.bool_)
            a[rest, rest] -= numpy.where(lower, update, 0)
            a[rest, block] = factors
            if hermitian:
                diagonal = numpy.arange(k + rows, n)
                a[diagonal, diagonal] = a[diagonal, diagonal].real
        pivots[k : k + rows] = kp + 1 if rows == 1 else -(kp + 1)
        k += rows
    return pivots, info


@kernel(KERNELS, "linalg_ldl_factor_ex")
def linalg_ldl_factor_ex(
    self: Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    check_inexact("linalg_ldl_factor_ex", "self", self)
    check_square("linalg_ldl_factor_ex", "self", self)
    n, batch = self.shape[-1], self.shape[:-2]
    hermitian = hermitian and numpy.iscomplexobj(self)
    factors = numpy.tril(self).reshape(math.prod(batch), n, n)
    pivots, info = numpy.zeros((len(factors), n), numpy.int32), numpy.zeros(len(factors), numpy.int32)
    for item, matrix in enumerate(factors):
        pivots[item], info[item] = _factor(matrix, hermitian)
    if check_errors:
        check_info("linalg_ldl_factor_ex", info, "is singular")
    return column_major(factors.reshape(self.shape)), pivots.reshape(self.shape[:-1]), info.reshape(batch)


def _solve(a: Array, pivots: Array, x: Array, hermitian: bool) -> None:
    """Solve with the factors of one matrix, in place: forwards through P and L, D, then backwards."""
    n, k, steps = a.shape[0], 0, []
    while k < n:
        rows = 1 if pivots[k] > 0 else 2
        kk, kp = k + rows - 1, abs(int(pivots[k])) - 1
        steps.append((k, rows, kk, kp))
        if kp != kk:
            x[[kk, kp]] = x[[kp, kk]]
        x[k + rows :] -= a[k + rows :, k : k + rows] @ x[k : k + rows]
        k += rows
    for k, rows, _, _ in steps:
        block = _block(a, k, rows, hermitian)
        x[k : k + rows] = x[k : k + rows] / block if rows == 1 else numpy.linalg.solve(block, x[k : k + rows])
    for k, rows, kk, kp in reversed(steps):
        below = a[k + rows :, k : k + rows]
        x[k : k + rows] -= (below.conj() if hermitian else below).T @ x[k + rows :]
        if kp != kk:
            x[[kk, kp]] = x[[kp, kk]]


@kernel(KERNELS, "linalg_ldl_solve")
def linalg_ldl_solve(LD: Array, pivots: Array, B: Array, *, hermitian: bool = False) -> Array:
    check_inexact("linalg_ldl_solve", "LD", LD)
    check_square("linalg_ldl_solve", "LD", LD)
    hermitian = hermitian and numpy.iscomplexobj(LD)
    batch, n = numpy.broadcast_shapes(LD.shape[:-2], B.shape[:-2]), LD.shape[-1]
    count = math.prod(batch)
    factors = numpy.broadcast_to(LD, (*batch, n, n)).reshape(count, n, n)
    order = numpy.broadcast_to(pivots, (*batch, n)).reshape(count, n)
    result = numpy.array(numpy.broadcast_to(B, (*batch, *B.shape[-2:])), order="C")
    flat = result.reshape(count, *B.shape[-2:])
    for item in range(count):
        _solve(factors[item], order[item], flat[item], hermitian)
    return column_major(result)
