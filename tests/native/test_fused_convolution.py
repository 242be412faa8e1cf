"""Convolution with a fused epilogue: the arithmetic written out in eager PyTorch is the oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.native import shim
from tests.native.shim import Opt, ShimError


def raw_call(name: str, *args: Any) -> torch.Tensor:
    """``call`` with ctypes values passed as they are; one result."""
    owned: list[Any] = []
    c_args: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            owned.append(shim.handle(arg))
            c_args.append(owned[-1])
        elif isinstance(arg, Opt):
            if arg.value is None:
                c_args.append(ctypes.c_void_p())
            else:
                owned.append(shim.handle(arg.value))
                c_args.append(ctypes.byref(owned[-1]))
        elif isinstance(arg, list):
            c_args += [(ctypes.c_int64 * max(len(arg), 1))(*arg), ctypes.c_int64(len(arg))]
        elif isinstance(arg, int):
            c_args.append(ctypes.c_int64(arg))
        elif isinstance(arg, str):
            c_args.append(ctypes.c_char_p(arg.encode()))
        else:
            c_args.append(ctypes.c_void_p() if arg is None else arg)
    out = ctypes.c_void_p()
    c_args.append(ctypes.byref(out))
    try:
        shim.raise_on(getattr(shim.lib, name)(*c_args))
        return shim.to_torch(out)
    finally:
        for h in owned:
            shim.delete(h)
        if out.value:
            shim.delete(out)


def scalars(*values: float) -> list[Any]:
    """The (const double**, length) pair."""
    cells = [ctypes.pointer(ctypes.c_double(v)) for v in values]
    return [(ctypes.POINTER(ctypes.c_double) * max(len(cells), 1))(*cells), ctypes.c_int64(len(cells))]


def text(value: str | None) -> Any:
    """A const char**, or null."""
    return None if value is None else ctypes.byref(ctypes.c_char_p(value.encode()))


UNARY: dict[str, tuple[str, list[float], str | None, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": ("none", [], None, lambda x: x),
    "relu": ("relu", [], None, F.relu),
    "sigmoid": ("sigmoid", [], None, torch.sigmoid),
    "tanh": ("tanh", [], None, torch.tanh),
    "swish": ("swish", [], None, F.silu),
    "hardswish": ("hardswish", [], None, F.hardswish),
    "hardsigmoid": ("hardsigmoid", [], None, F.hardsigmoid),
    "hardtanh": ("hardtanh", [-0.5, 2.0], None, lambda x: F.hardtanh(x, -0.5, 2.0)),
    "leaky_relu": ("leaky_relu", [0.2], None, lambda x: F.leaky_relu(x, 0.2)),
    "gelu": ("gelu", [], "none", F.gelu),
    "gelu tanh": ("gelu", [], "tanh", lambda x: F.gelu(x, approximate="tanh")),
}
X, W, B = torch.randn(2, 8, 20, 21) * 2, torch.randn(12, 4, 3, 3), torch.randn(12)
LISTS: tuple[Any, ...] = ([1, 0], [2, 1], [1, 1])  # padding, stride, dilation


def plain(x: torch.Tensor = X) -> torch.Tensor:
    return F.conv2d(x, W.to(x.dtype), B.to(x.dtype), (2, 1), (1, 0), 1, 2)


@pytest.mark.parametrize("case", UNARY)
def test_pointwise(case: str) -> None:
    attr, values, algorithm, function = UNARY[case]
    got = raw_call(
        "aoti_torch_cpu_mkldnn__convolution_pointwise",
        X,
        W,
        Opt(B),
        *LISTS,
        2,
        attr,
        *scalars(*values),
        text(algorithm),
    )
    torch.testing.assert_close(got, function(plain()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pointwise_channels_last_and_dtypes(dtype: torch.dtype) -> None:
    x = X.to(dtype).to(memory_format=torch.channels_last)
    got = raw_call(
        "aoti_torch_cpu_mkldnn__convolution_pointwise", x, W.to(dtype), Opt(B.to(dtype)), *LISTS, 2, "relu",
        *scalars(), None,
    )  # fmt: skip
    want = F.relu(plain(x))
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("attr", ["add", "sub", "mul", "div"])
def test_binary(attr: str) -> None:
    other = torch.rand(plain().shape).to(memory_format=torch.channels_last) + 0.5
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    }  # fmt: skip
    got = raw_call(
        "aoti_torch_cpu_mkldnn__convolution_pointwise_binary", X, other, W, Opt(B), *LISTS, 2, attr, None, text("relu"),
        *scalars(), None,
    )  # fmt: skip
    torch.testing.assert_close(got, F.relu(functions[attr](plain(), other)), rtol=1e-4, atol=1e-4)


def test_binary_in_place() -> None:
    other = torch.randn(plain().shape)
    want = plain() + other
    got = raw_call(
        "aoti_torch_cpu_mkldnn__convolution_pointwise_binary_", other, X, W, Opt(B), *LISTS, 2, "add",
        ctypes.byref(ctypes.c_double(1.0)), None, *scalars(), None,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got, other)


def test_transposed() -> None:
    w, b = torch.randn(8, 6, 3, 3), torch.randn(12)
    got = raw_call(
        "aoti_torch_cpu_mkldnn__convolution_transpose_pointwise", X, w, Opt(b), [1, 1], [1, 0], [2, 2], [1, 1], 2,
        "relu", *scalars(), None,
    )  # fmt: skip
    want = F.relu(F.conv_transpose2d(X, w, b, 2, 1, (1, 0), 2, 1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def message(*args: Any) -> str:
    with pytest.raises(ShimError) as failure:
        raw_call(*args)
    return str(failure.value)


def test_errors() -> None:
    name, op = "aoti_torch_cpu_mkldnn__convolution_pointwise", "mkldnn::_convolution_pointwise"
    assert message(name, X, W, Opt(B), *LISTS, 2, "elu", *scalars(), None) == (
        f"{op}: the fused step 'elu' is not supported, expected none, relu, sigmoid, tanh, swish, hardswish, "
        "hardsigmoid, hardtanh, leaky_relu or gelu"
    )
    assert message(name, X, W, Opt(B), *LISTS, 2, "leaky_relu", *scalars(), None) == (
        f"{op}: 'leaky_relu' needs 1 scalars, got 0"
    )
    assert message(name, X, W, Opt(B), *LISTS, 2, "gelu", *scalars(), text("fast")) == (
        f"{op}: the gelu algorithm must be none or tanh, got 'fast'"
    )
    other, rest = torch.zeros(plain().shape), (*LISTS, 2)
    tail = (None, *scalars(), None)
    assert message(name + "_binary", X, other, W, Opt(B), *rest, "pow", None, *tail) == (
        f"{op}.binary: the fused binary step 'pow' is not supported, expected add, sub, mul or div"
    )
    two = ctypes.byref(ctypes.c_double(2.0))
    assert message(name + "_binary", X, other, W, Opt(B), *rest, "add", two, *tail) == (
        f"{op}.binary: argument 'alpha' must be 1, got 2"
    )
    assert message(name + "_binary", X, other.double(), W, Opt(B), *rest, "add", None, *tail) == (
        f"{op}.binary: argument 'other' must be float32 like X, got float64"
    )
    assert message(name + "_binary_", other, X, W, Opt(B), *rest, "mul", None, *tail) == (
        f"{op}_.binary: the in-place step must be add, got 'mul'"
    )
    assert message(name + "_binary_", other[:1], X, W, Opt(B), *rest, "add", None, *tail) == (
        f"{op}_.binary: argument 'other' must have shape [2, 12, 10, 19], got [1, 12, 10, 19]"
    )
