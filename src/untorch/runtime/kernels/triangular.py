"""Triangular systems and LU factors on batches of matrices: the parts of LAPACK that numpy does not offer."""

from __future__ import annotations

import math

import numpy

from untorch.runtime.kernels.arrays import Array

# Columns that are factored one by one before the rest of the matrix is updated with a GEMM.
_PANEL = 32


def solve_upper(a: Array, b: Array, unit: bool = False) -> Array:
    """x with a x = b for upper triangular ``a`` (…, n, n), ``b`` (…, n, k); what is below the diagonal is not read.

    A zero on the diagonal gives infinities and NaN, as LAPACK does.
    """
    x, n = _right_side(a, b), a.shape[-1]
    for end in range(n, 0, -_PANEL):
        start = max(end - _PANEL, 0)
        for row in range(end - 1, start - 1, -1):
            if row + 1 < end:
                x[..., row, :] -= (a[..., row, None, row + 1 : end] @ x[..., row + 1 : end, :])[..., 0, :]
            if not unit:
                x[..., row, :] /= a[..., row, row, None]
        if start > 0:
            x[..., :start, :] -= a[..., :start, start:end] @ x[..., start:end, :]
    return x


def solve_lower(a: Array, b: Array, unit: bool = False) -> Array:
    """As ``solve_upper``, for lower triangular ``a``."""
    x, n = _right_side(a, b), a.shape[-1]
    for start in range(0, n, _PANEL):
        end = min(start + _PANEL, n)
        for row in range(start, end):
            if row > start:
                x[..., row, :] -= (a[..., row, None, start:row] @ x[..., start:row, :])[..., 0, :]
            if not unit:
                x[..., row, :] /= a[..., row, row, None]
        if end < n:
            x[..., end:, :] -= a[..., end:, start:end] @ x[..., start:end, :]
    return x


def _right_side(a: Array, b: Array) -> Array:
    """A copy of ``b``, broadcast to the batch of both, to solve in place."""
    shape = numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return numpy.array(numpy.broadcast_to(b, (*shape, *b.shape[-2:])), order="C")


def solve(a: Array, b: Array, upper: bool, unit: bool = False) -> Array:
    return solve_upper(a, b, unit) if upper else solve_lower(a, b, unit)


def lu_factor(a: Array) -> tuple[Array, Array, Array]:
    """LU with row pivoting of ``a`` (…, m, n): factors in one matrix, pivots (…, min(m, n)) from 1, and info (…).

    Right-looking and blocked. info is the number of the first zero pivot, counted from 1, or 0. Pivots are chosen as
    LAPACK does, also for complex numbers, whose size there is |re| + |im|.
    """
    batch, (m, n) = a.shape[:-2], a.shape[-2:]
    lu = numpy.array(a, order="C").reshape(math.prod(batch), m, n)
    steps = min(m, n)
    items = numpy.arange(lu.shape[0])
    pivots = numpy.zeros((lu.shape[0], steps), numpy.int32)
    info = numpy.zeros(lu.shape[0], numpy.int32)
    for start in range(0, steps, _PANEL):
        end = min(start + _PANEL, steps)
        for k in range(start, end):
            column = lu[:, k:, k]
            size = abs(column.real) + abs(column.imag) if numpy.iscomplexobj(column) else abs(column)
            pivot = k + size.argmax(axis=1) if lu.shape[0] else items
            pivots[:, k] = pivot + 1
            row = lu[items, pivot].copy()
            lu[items, pivot] = lu[:, k]
            lu[:, k] = row
            singular = lu[:, k, k] == 0
            info[singular & (info == 0)] = k + 1
            divisor = numpy.where(singular, lu.dtype.type(1), lu[:, k, k])
            lu[:, k + 1 :, k] /= divisor[:, None]
            lu[:, k + 1 :, k + 1 : end] -= lu[:, k + 1 :, k, None] * lu[:, k, None, k + 1 : end]
        if end < n:
            lu[:, start:end, end:] = solve_lower(lu[:, start:end, start:end], lu[:, start:end, end:], unit=True)
            lu[:, end:, end:] -= lu[:, end:, start:end] @ lu[:, start:end, end:]
    return lu.reshape(*batch, m, n), pivots.reshape(*batch, steps), info.reshape(batch)


def permutation(pivots: Array, rows: int) -> Array:
    """The row order (…, rows) that the pivots (…, k) of ``lu_factor`` bring about: a[order] = L U."""
    batch, steps = pivots.shape[:-1], pivots.shape[-1]
    flat = pivots.reshape(math.prod(batch), steps)  # no -1: it cannot be told when steps is 0
    order = numpy.tile(numpy.arange(rows), (flat.shape[0], 1))
    items = numpy.arange(flat.shape[0])
    for k in range(flat.shape[1]):
        other = flat[:, k].astype(numpy.int64) - 1
        moved = order[items, other].copy()
        order[items, other] = order[:, k]
        order[:, k] = moved
    return order.reshape(*batch, rows)


def lu_solve(lu: Array, pivots: Array, b: Array, adjoint: bool = False) -> Array:
    """x with a x = b, or with the adjoint of a, from the factors of a; batch axes are broadcast."""
    order = permutation(pivots, lu.shape[-1])
    batch = numpy.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    order = numpy.broadcast_to(order, (*batch, order.shape[-1]))[..., None]
    b = numpy.broadcast_to(b, (*batch, *b.shape[-2:]))
    if not adjoint:
        return solve_upper(lu, solve_lower(lu, numpy.take_along_axis(b, order, axis=-2), unit=True))
    adjoint_lu = lu.conj().swapaxes(-1, -2)
    y = solve_upper(adjoint_lu, solve_lower(adjoint_lu, b), unit=True)
    x = numpy.empty_like(y)
    numpy.put_along_axis(x, order, y, axis=-2)
    return x
