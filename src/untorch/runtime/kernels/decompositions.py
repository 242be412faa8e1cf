"""Matrix decompositions and functions of matrices: SVD, eigenvalues, QR, pseudo-inverse, exponential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy

from untorch.runtime.errors import InvalidArgumentError, ModelError
from untorch.runtime.kernels.arrays import (
    Array,
    check_inexact,
    check_matrix,
    check_square,
    column_major,
    empty_like,
    kernel,
    row_major,
)

KERNELS: dict[str, Callable[..., Any]] = {}


def _real_dtype(array: Array) -> numpy.dtype[Any]:
    return numpy.empty(0, array.dtype).real.dtype


@kernel(KERNELS, "_linalg_svd")
def linalg_svd(
    A: Array,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Array, Array, Array]:
    """``driver`` picks a CUDA routine and means nothing here. U and Vh are unique up to the signs of their columns."""
    del driver
    check_inexact("_linalg_svd", "A", A)
    check_matrix("_linalg_svd", "A", A)
    m, n = A.shape[-2:]
    if A.size == 0:
        u, vh, s = _empty_svd(A, full_matrices)
        return (u, s, vh) if compute_uv else (empty_like(A), s, empty_like(A))
    try:
        if not compute_uv:
            return empty_like(A), row_major(numpy.linalg.svd(A, compute_uv=False)), empty_like(A)
        u, s, vh = numpy.linalg.svd(A, full_matrices=full_matrices)
    except numpy.linalg.LinAlgError as error:
        raise ModelError(f"_linalg_svd: the algorithm did not converge for a matrix of {m} by {n}: {error}") from error
    return column_major(u), row_major(s), column_major(vh)


def _empty_svd(a: Array, full_matrices: bool) -> tuple[Array, Array, Array]:
    batch, (m, n) = a.shape[:-2], a.shape[-2:]
    k = min(m, n)
    u = numpy.broadcast_to(
        numpy.eye(m, m if full_matrices else k, dtype=a.dtype), (*batch, m, m if full_matrices else k)
    )
    vh = numpy.broadcast_to(
        numpy.eye(n if full_matrices else k, n, dtype=a.dtype), (*batch, n if full_matrices else k, n)
    )
    return column_major(u), column_major(vh), numpy.zeros((*batch, k), _real_dtype(a))


@kernel(KERNELS, "_linalg_eigh")
def linalg_eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    check_inexact("_linalg_eigh", "A", A)
    check_square("_linalg_eigh", "A", A)
    if UPLO.upper() not in ("L", "U"):
        raise InvalidArgumentError(f"_linalg_eigh: argument `UPLO`: expected L or U, got {UPLO!r}")
    triangle: Literal["L", "U"] = "L" if UPLO.upper() == "L" else "U"
    try:
        if not compute_v:
            return row_major(numpy.linalg.eigvalsh(A, triangle)), empty_like(A)
        values, vectors = numpy.linalg.eigh(A, triangle)
    except numpy.linalg.LinAlgError as error:
        raise ModelError(f"_linalg_eigh: the algorithm did not converge: {error}") from error
    return row_major(values), column_major(vectors)


def _complex_dtype(array: Array) -> numpy.dtype[Any]:
    return numpy.result_type(array.dtype, numpy.complex64)


def _check_finite(operator: str, array: Array) -> None:
    if not numpy.isfinite(array).all():
        raise ModelError(f"{operator}: argument `self`: expected finite values, got infinity or NaN")


@kernel(KERNELS, "linalg_eig")
def linalg_eig(self: Array) -> tuple[Array, Array]:
    check_inexact("linalg_eig", "self", self)
    check_square("linalg_eig", "self", self)
    _check_finite("linalg_eig", self)
    values, vectors = numpy.linalg.eig(self)
    dtype = _complex_dtype(self)  # numpy answers in reals when all eigenvalues happen to be real
    return row_major(values.astype(dtype)), column_major(vectors.astype(dtype))


@kernel(KERNELS, "linalg_eigvals", "_linalg_eigvals")
def linalg_eigvals(self: Array) -> Array:
    check_inexact("linalg_eigvals", "self", self)
    check_square("linalg_eigvals", "self", self)
    _check_finite("linalg_eigvals", self)
    return row_major(numpy.linalg.eigvals(self).astype(_complex_dtype(self)))


@kernel(KERNELS, "linalg_qr")
def linalg_qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    check_inexact("linalg_qr", "A", A)
    check_matrix("linalg_qr", "A", A)
    if mode not in ("reduced", "complete", "r"):
        raise InvalidArgumentError(f"linalg_qr: argument `mode`: expected reduced, complete or r, got {mode!r}")
    if mode == "r":
        return empty_like(A), column_major(numpy.asarray(numpy.linalg.qr(A, mode="r")))
    q, r = numpy.linalg.qr(A, mode=mode)  # type: ignore[call-overload]
    return column_major(q), column_major(r)


@kernel(KERNELS, "geqrf")
def geqrf(self: Array) -> tuple[Array, Array]:
    """R above the diagonal and the Householder vectors below it, and their factors."""
    check_inexact("geqrf", "self", self)
    check_matrix("geqrf", "self", self)
    transposed, tau = numpy.linalg.qr(self, mode="raw")
    factors = transposed.swapaxes(-1, -2).astype(self.dtype, copy=False)
    return column_major(factors), row_major(tau.astype(self.dtype, copy=False))


def _reflect(vectors: Array, tau: Array, target: Array, adjoint: bool) -> Array:
    """Q target, or Q^H target, for Q = H_0 H_1 … with H_i = 1 - tau_i v_i v_i^H, v_i stored as geqrf does."""
    rows, count = vectors.shape[-2], tau.shape[-1]
    result = numpy.array(target, order="C")
    for i in range(count) if adjoint else reversed(range(count)):
        v = vectors[..., i:, i].copy()
        v[..., 0] = 1
        factor = tau[..., i].conj() if adjoint else tau[..., i]
        projection = v.conj()[..., None, :] @ result[..., i:rows, :]
        result[..., i:rows, :] -= factor[..., None, None] * v[..., :, None] * projection
    return result


@kernel(KERNELS, "linalg_householder_product", "orgqr")
def linalg_householder_product(input: Array, tau: Array) -> Array:
    check_inexact("linalg_householder_product", "input", input)
    check_matrix("linalg_householder_product", "input", input)
    m, n = input.shape[-2:]
    identity = numpy.broadcast_to(numpy.eye(m, n, dtype=input.dtype), input.shape)
    return column_major(_reflect(input, tau, identity, adjoint=False))


@kernel(KERNELS, "ormqr")
def ormqr(self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False) -> Array:
    """Q input3, Q^H input3, input3 Q or input3 Q^H, with Q from geqrf's ``self`` and ``input2``."""
    check_inexact("ormqr", "self", self)
    check_matrix("ormqr", "self", self)
    if left:
        return column_major(_reflect(self, input2, input3, transpose))
    adjoint = _reflect(self, input2, input3.conj().swapaxes(-1, -2), not transpose)
    return column_major(adjoint.conj().swapaxes(-1, -2))


@kernel(KERNELS, "linalg_pinv.atol_rtol_tensor")
def linalg_pinv(
    self: Array,
    *,
    atol: Array | None = None,
    rtol: Array | None = None,
    hermitian: bool = False,
) -> Array:
    """Singular values up to max(atol, rtol * largest) count as zero; rtol is eps * max(m, n) unless atol is given."""
    check_inexact("linalg_pinv", "self", self)
    check_matrix("linalg_pinv", "self", self)
    m, n = self.shape[-2:]
    if self.size == 0:
        return numpy.empty((*self.shape[:-2], n, m), self.dtype)
    absolute = numpy.zeros((), _real_dtype(self)) if atol is None else numpy.asarray(atol)
    default = numpy.finfo(self.dtype).eps * max(m, n)
    relative = numpy.where(absolute > 0, 0, default) if rtol is None else numpy.asarray(rtol)
    if hermitian:
        check_square("linalg_pinv", "self", self)
        values, vectors = numpy.linalg.eigh(self)
        left, right = vectors, vectors.conj().swapaxes(-1, -2)
    else:
        u, values, vh = numpy.linalg.svd(self, full_matrices=False)
        left, right = vh.conj().swapaxes(-1, -2), u.conj().swapaxes(-1, -2)
    size = abs(values)
    tolerance = numpy.maximum(absolute[..., None], relative[..., None] * size.max(axis=-1, keepdims=True))
    inverse = numpy.divide(1, values, out=numpy.zeros_like(values), where=size > tolerance)
    return row_major((left * inverse[..., None, :]) @ right).astype(self.dtype, copy=False)


# Numerator of the diagonal Padé approximant of degree 13; the norm up to which it is exact to double precision.
# Higham, "The scaling and squaring method for the matrix exponential revisited" (2005).
_PADE = (
    64764752532480000.0, 32382376266240000.0, 7771770303897600.0, 1187353796428800.0, 129060195264000.0,
    10559470521600.0, 670442572800.0, 33522128640.0, 1323241920.0, 40840800.0, 960960.0, 16380.0, 182.0, 1.0,
)  # fmt: skip
_PADE_NORM = 5.371920351148152


@kernel(KERNELS, "linalg_matrix_exp", "matrix_exp")
def linalg_matrix_exp(self: Array) -> Array:
    """Scaling and squaring, in double precision for every dtype."""
    check_square("linalg_matrix_exp", "self", self)
    if self.size == 0:
        return numpy.array(self)
    a = self.astype(numpy.complex128 if numpy.iscomplexobj(self) else numpy.float64)
    norm = abs(a).sum(axis=-2).max(axis=-1)
    finite = numpy.isfinite(norm)
    scaled = numpy.where(finite & (norm > _PADE_NORM), norm / _PADE_NORM, 1)
    squarings = numpy.ceil(numpy.log2(scaled)).astype(numpy.int64)
    a = numpy.where(finite[..., None, None], a, 0) / numpy.exp2(squarings)[..., None, None]
    identity = numpy.eye(a.shape[-1], dtype=a.dtype)
    a2 = a @ a
    a4 = a2 @ a2
    a6 = a4 @ a2
    c = _PADE
    odd = a @ (a6 @ (c[13] * a6 + c[11] * a4 + c[9] * a2) + c[7] * a6 + c[5] * a4 + c[3] * a2 + c[1] * identity)
    even = a6 @ (c[12] * a6 + c[10] * a4 + c[8] * a2) + c[6] * a6 + c[4] * a4 + c[2] * a2 + c[0] * identity
    result = numpy.linalg.solve(even - odd, even + odd)
    for step in range(int(squarings.max(initial=0))):
        result = numpy.where((squarings > step)[..., None, None], result @ result, result)
    result = numpy.where(finite[..., None, None], result, numpy.nan)
    return row_major(result.astype(self.dtype))
