"""Complex numbers: kernels against PyTorch's operators, in both precisions and with transposed inputs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from tests.unit.kernels.oracle import check
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels import complex_numbers
from untorch.runtime.registry import find_kernel

DTYPES = [torch.complex64, torch.complex128]


def sample(*shape: int, dtype: torch.dtype = torch.complex64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted({*complex_numbers._UNARY} - {"_conj"}))  # which is a lazy view in PyTorch
def test_unary(name: str, dtype: torch.dtype) -> None:
    x = sample(4, 5, dtype=dtype).t()
    if name.startswith("is"):
        x = x.clone()
        x[0, 0], x[1, 1] = complex("nan"), complex("inf")
        expected = getattr(torch, name)(x)
        assert find_kernel(f"aten::{name}")(x.numpy()).tolist() == expected.tolist()
        return
    check(name, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary(dtype: torch.dtype) -> None:
    x, y, real = sample(4, 5, dtype=dtype), sample(5, dtype=dtype, seed=1), sample(4, 5, dtype=dtype, seed=2).real
    number = torch.tensor(2.0 - 1.0j, dtype=torch.complex64)
    for name in ("add.Tensor", "sub.Tensor", "div.Tensor"):
        check(name, x, y)
        check(name, x, real.contiguous())
        check(name, real.contiguous(), number)
        check(name, number, x)
    check("sub.Tensor", x, y, alpha=2)
    check("addcmul", x, x, y, value=0.5)
    check("addcdiv", x, x, y, value=0.5)
    for name in ("eq", "ne"):
        check(f"{name}.Tensor", x, x.clone())
        check(f"{name}.Scalar", x, 1)
    check("where.self", real > 0, x, number.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    check("sum", x)
    check("mean", x)
    check("prod", x)
    for keepdim in (False, True):
        check("sum.dim_IntList", x, [0, 2], keepdim)
        check("mean.dim", x, [1], keepdim)
        check("prod.dim_int", x, 1, keepdim)
        check("var.correction", x, [0, 1], correction=1, keepdim=keepdim)
    check("sum.dim_IntList", x, None)
    check("var.correction", x, correction=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype) -> None:
    a, b, c = sample(4, 5, dtype=dtype), sample(5, 6, dtype=dtype, seed=1), sample(4, 6, dtype=dtype, seed=2)
    x, y = sample(2, 4, 5, dtype=dtype), sample(2, 5, 6, dtype=dtype, seed=3)
    check("mm", a, b)
    check("mm", b.t(), a.t())
    check("bmm", x, y)
    check("mv", a, b[:, 0])
    check("dot", a[0], b[:, 0])
    check("vdot", a[0], b[:, 0])
    check("addmm", c, a, b, beta=0.5, alpha=2)
    check("addmm", c[0], a, b)
    check("baddbmm", c[None], x, y, beta=2)
    check("addmv", c[:, 0], a, b[:, 0], alpha=2)
    check("addmm", torch.full_like(c, complex("nan")), a, b, beta=0)


def test_views_and_copies() -> None:
    x = sample(3, 1, 4)
    for name, args in (
        ("expand", ([2, 3, 5, -1],)), ("unsqueeze", (1,)), ("unsqueeze", (-1,)), ("squeeze.dim", (1,)),
        ("squeeze.dim", (0,)), ("squeeze.dims", ([0, 1],)), ("select.int", (2, -1)), ("diagonal", (1, 0, 2)),
        ("split.Tensor", (2, 0)), ("unbind.int", (2,)), ("repeat", ([2, 1, 1, 3],)), ("clone", ()),
        ("constant_pad_nd", ([1, 2, 0, -1], 0.5)), ("constant_pad_nd", ([-1, 0],)),
    ):  # fmt: skip
        check(name, x, *args)
    check("slice_scatter", x, sample(3, 1, 2), 2, 1, 3)
    check("slice_scatter", x, sample(2, 1, 4), 0, -2, 9)
    check("select_scatter", x, sample(3, 4), 1, 0)
    check("copy", x.transpose(0, 2), sample(4, 1, 1))
    conjugate = find_kernel("aten::_conj")(x.numpy())
    numpy.testing.assert_array_equal(conjugate, x.conj().resolve_conj().numpy())
    flipped = find_kernel("prims::rev")(x.numpy(), [0, 2])
    numpy.testing.assert_array_equal(flipped, x.flip(0, 2).numpy())
    wider: Any = find_kernel("prims::convert_element_type")(x.numpy(), numpy.dtype("complex128"))
    assert wider.dtype == numpy.complex128
    with pytest.raises(InvalidArgumentError, match="aten::select.int: index 4 is out of range for 4 elements"):
        find_kernel("aten::select.int")(x.numpy(), 2, 4)
