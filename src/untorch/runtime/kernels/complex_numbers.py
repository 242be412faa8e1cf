"""What Inductor leaves to eager PyTorch for complex numbers: it generates code for real dtypes only.

Shapes, dtypes and memory layouts are PyTorch's. Views come as copies, or as numpy's views of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, kernel

KERNELS: dict[str, Callable[..., Any]] = {}

_UNARY: dict[str, Callable[[Array], Any]] = {
    "exp": numpy.exp, "exp2": numpy.exp2, "expm1": numpy.expm1, "log": numpy.log, "log2": numpy.log2,
    "log10": numpy.log10, "log1p": numpy.log1p, "sqrt": numpy.sqrt, "sin": numpy.sin, "cos": numpy.cos,
    "tan": numpy.tan, "sinh": numpy.sinh, "cosh": numpy.cosh, "tanh": numpy.tanh, "asin": numpy.arcsin,
    "acos": numpy.arccos, "atan": numpy.arctan, "asinh": numpy.arcsinh, "acosh": numpy.arccosh,
    "atanh": numpy.arctanh, "neg": numpy.negative, "_conj": numpy.conjugate, "_conj_physical": numpy.conjugate,
    "isnan": numpy.isnan, "isinf": numpy.isinf, "isfinite": numpy.isfinite, "reciprocal": numpy.reciprocal,
    "square": numpy.square,
    "rsqrt": lambda x: 1 / numpy.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + numpy.exp(-x)),
}  # fmt: skip


def _register_unary(name: str, function: Callable[[Array], Any]) -> None:
    # exp2 has no loop for complex numbers in numpy.
    compute = (lambda x: numpy.exp(x * numpy.log(2))) if name == "exp2" else function
    same_dtype = not name.startswith("is")

    @kernel(KERNELS, name)
    def unary(self: Array) -> Array:
        result = numpy.asarray(compute(self))
        return result.astype(self.dtype, copy=False) if same_dtype else result


for _name, _function in _UNARY.items():
    _register_unary(_name, _function)


def _common(*operands: Any) -> numpy.dtype[Any]:
    """PyTorch's promotion: arrays without dimensions count as numbers, and a half type is none that is complex."""
    whole = [x.dtype for x in operands if numpy.ndim(x) > 0]
    single = [x.dtype for x in operands if numpy.ndim(x) == 0 and isinstance(x, numpy.ndarray)]
    dtype = numpy.result_type(*(whole or single))
    if any(numpy.dtype(d).kind == "c" for d in single) and dtype.kind != "c":
        dtype = numpy.dtype(numpy.complex128 if dtype == numpy.float64 else numpy.complex64)
    return dtype


@kernel(KERNELS, "add.Tensor")
def add(self: Array, other: Array, alpha: Any = 1) -> Array:
    return numpy.asarray(self + alpha * other, _common(self, other))


@kernel(KERNELS, "sub.Tensor")
def sub(self: Array, other: Array, alpha: Any = 1) -> Array:
    return numpy.asarray(self - alpha * other, _common(self, other))


@kernel(KERNELS, "div.Tensor")
def div(self: Array, other: Array) -> Array:
    return numpy.asarray(self / other, _common(self, other))


@kernel(KERNELS, "addcmul")
def addcmul(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    return numpy.asarray(self + value * tensor1 * tensor2, _common(self, tensor1, tensor2))


@kernel(KERNELS, "addcdiv")
def addcdiv(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    return numpy.asarray(self + value * tensor1 / tensor2, _common(self, tensor1, tensor2))


@kernel(KERNELS, "eq.Tensor", "eq.Scalar")
def eq(self: Array, other: Any) -> Array:
    return numpy.asarray(self == other)


@kernel(KERNELS, "ne.Tensor", "ne.Scalar")
def ne(self: Array, other: Any) -> Array:
    return numpy.asarray(self != other)


@kernel(KERNELS, "where.self")
def where(condition: Array, self: Array, other: Array) -> Array:
    return numpy.where(condition, self, other).astype(_common(self, other), copy=False)


def _axes(dim: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


@kernel(KERNELS, "sum", "sum.dim_IntList")
def sum_(self: Array, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return numpy.asarray(numpy.sum(self, axis=_axes(dim), keepdims=keepdim, dtype=dtype or self.dtype))


@kernel(KERNELS, "mean", "mean.dim")
def mean(self: Array, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return numpy.asarray(numpy.mean(self, axis=_axes(dim), keepdims=keepdim, dtype=dtype or self.dtype))


@kernel(KERNELS, "prod", "prod.dim_int")
def prod(self: Array, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return numpy.asarray(numpy.prod(self, axis=dim, keepdims=keepdim, dtype=dtype or self.dtype))


@kernel(KERNELS, "var.correction")
def var(self: Array, dim: Sequence[int] | None = None, correction: Any = None, keepdim: bool = False) -> Array:
    axes = _axes(dim)
    count = self.size if axes is None else int(numpy.prod([self.shape[axis] for axis in axes]))
    distance = abs(self - self.mean(axis=axes, keepdims=True)) ** 2
    return numpy.asarray(
        distance.sum(axis=axes, keepdims=keepdim) / max(count - (1 if correction is None else correction), 0)
    )


@kernel(KERNELS, "mm", "bmm")
def mm(self: Array, mat2: Array) -> Array:
    return numpy.ascontiguousarray(self @ mat2)


@kernel(KERNELS, "mv")
def mv(self: Array, vec: Array) -> Array:
    return numpy.asarray(self @ vec)


@kernel(KERNELS, "dot")
def dot(self: Array, tensor: Array) -> Array:
    return numpy.asarray(numpy.dot(self, tensor))


@kernel(KERNELS, "vdot")
def vdot(self: Array, other: Array) -> Array:
    return numpy.asarray(numpy.vdot(self, other))


@kernel(KERNELS, "addmm")
def addmm(self: Array, mat1: Array, mat2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    return _plus(self, mat1 @ mat2, beta, alpha)


@kernel(KERNELS, "baddbmm")
def baddbmm(self: Array, batch1: Array, batch2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    return _plus(self, batch1 @ batch2, beta, alpha)


@kernel(KERNELS, "addmv")
def addmv(self: Array, mat: Array, vec: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    return _plus(self, mat @ vec, beta, alpha)


def _plus(start: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """beta · start + alpha · product; a beta of 0 does not read start."""
    scaled = alpha * product
    result = scaled + beta * start if beta != 0 else scaled
    return numpy.ascontiguousarray(numpy.asarray(result, product.dtype))


@kernel(KERNELS, "clone")
def clone(self: Array, memory_format: Any = None) -> Array:
    return numpy.array(self, order="K")


@kernel(KERNELS, "prims::convert_element_type")
def convert_element_type(a: Array, dtype: Any) -> Array:
    return numpy.array(a if numpy.dtype(dtype).kind == "c" or a.dtype.kind != "c" else a.real, dtype, order="K")


@kernel(KERNELS, "expand")
def expand(self: Array, size: Sequence[int], implicit: bool = False) -> Array:
    missing = len(size) - self.ndim
    whole = [self.shape[i - missing] if n == -1 else n for i, n in enumerate(size)]
    return numpy.broadcast_to(self, whole)


@kernel(KERNELS, "unsqueeze")
def unsqueeze(self: Array, dim: int) -> Array:
    return numpy.expand_dims(self, dim)


@kernel(KERNELS, "squeeze.dim", "squeeze.dims")
def squeeze(self: Array, dim: Any) -> Array:
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    return numpy.squeeze(self, tuple(axis for axis in axes if self.shape[axis] == 1))


@kernel(KERNELS, "select.int")
def select(self: Array, dim: int, index: int) -> Array:
    if not -self.shape[dim] <= index < self.shape[dim]:
        raise InvalidArgumentError(f"aten::select.int: index {index} is out of range for {self.shape[dim]} elements")
    return numpy.asarray(numpy.moveaxis(self, dim, 0)[index])


@kernel(KERNELS, "diagonal")
def diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return numpy.diagonal(self, offset, dim1, dim2)


@kernel(KERNELS, "split.Tensor")
def split(self: Array, split_size: int, dim: int = 0) -> list[Array]:
    places = range(split_size, self.shape[dim], split_size) if split_size else ()
    return numpy.split(self, list(places), dim)


@kernel(KERNELS, "unbind.int")
def unbind(self: Array, dim: int = 0) -> list[Array]:
    return list(numpy.moveaxis(self, dim, 0))


@kernel(KERNELS, "repeat")
def repeat(self: Array, repeats: Sequence[int]) -> Array:
    return numpy.ascontiguousarray(numpy.tile(self, tuple(repeats)))


@kernel(KERNELS, "prims::rev")
def rev(a: Array, dims: Sequence[int]) -> Array:
    return numpy.array(numpy.flip(a, tuple(dims)), order="C")


@kernel(KERNELS, "constant_pad_nd")
def constant_pad_nd(self: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """``pad``: before and after, from the last dimension on; what is negative is cut off."""
    cut = [slice(None)] * self.ndim
    widths = [(0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        axis, before, after = self.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        cut[axis] = slice(max(-before, 0), self.shape[axis] + min(after, 0))
        widths[axis] = (max(before, 0), max(after, 0))
    return numpy.pad(self[tuple(cut)], widths, constant_values=value)


@kernel(KERNELS, "copy")
def copy(self: Array, src: Array, non_blocking: bool = False) -> Array:
    result = numpy.empty_like(self)
    result[...] = src
    return result


@kernel(KERNELS, "slice_scatter")
def slice_scatter(
    self: Array, src: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """A copy of ``self`` with ``src`` in a slice of one dimension; places that are out of it are cut."""
    result = numpy.array(self, order="K")
    numpy.moveaxis(result, dim, 0)[slice(start, end, step)] = numpy.moveaxis(src, dim, 0)
    return result


@kernel(KERNELS, "select_scatter")
def select_scatter(self: Array, src: Array, dim: int, index: int) -> Array:
    result = numpy.array(self, order="K")
    numpy.moveaxis(result, dim, 0)[index] = src
    return result
