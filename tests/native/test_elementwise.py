"""Element-wise leftovers and factories against eager PyTorch: values, promotion, broadcasting, strides."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import CODES, Opt, ShimError, call

ALL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
       torch.uint8, torch.bool, torch.complex64, torch.complex128]  # fmt: skip
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
NONE: list[Any] = [None, None, None, -1, None]


def sample(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(low, 5, shape, generator=generator).to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor, layout: torch.Tensor | None = None) -> None:
    """Equal in values and strides. ``layout`` has the strides where eager's differ from what Inductor's meta says."""
    torch.testing.assert_close(got, expected, equal_nan=True)
    if layout is not None:
        expected = layout
    if expected.numel():
        significant = [i for i, n in enumerate(expected.shape) if n != 1]
        assert [got.stride(i) for i in significant] == [expected.stride(i) for i in significant]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(ALL), st.sampled_from(ALL), st.lists(st.integers(0, 4), max_size=4), st.data())
def test_add_and_mul(a: torch.dtype, b: torch.dtype, shape: list[int], data: st.DataObject) -> None:
    def operand(dtype: torch.dtype, seed: int) -> torch.Tensor:
        own = [1 if data.draw(st.booleans()) else n for n in shape][data.draw(st.integers(0, len(shape))) :]
        order = data.draw(st.permutations(range(len(own))))
        x = sample([own[i] for i in order], dtype, seed)
        return x.permute([order.index(i) for i in range(len(own))])

    x, y = operand(a, 1), operand(b, 2)
    if torch.result_type(x, y) == torch.complex32:  # float16 with a 0-D complex number
        with pytest.raises(ShimError, match="dtype complex32 is not supported"):
            call("aoti_torch_cpu_add_Tensor", x, y, 1.0, returns=1)
        return
    same(call("aoti_torch_cpu_add_Tensor", x, y, 1.0, returns=1), x + y)
    same(call("aoti_torch_cpu_mul_Tensor", x, y, returns=1), x * y)
    if torch.bool not in (a, b):
        same(call("aoti_torch_aten_subtract_Tensor", x, y, 2.0, returns=1), torch.sub(x, y, alpha=2))


@pytest.mark.parametrize("dtype", ALL)
def test_scalars(dtype: torch.dtype) -> None:
    x = sample([3, 4], dtype, 0).t()
    same(call("aoti_torch_cpu_add_Scalar", x, 1.5, 2.0, returns=1), torch.add(x, 1.5, alpha=2))
    same(call("aoti_torch_cpu_mul_Scalar", x, 2.5, returns=1), x * 2.5)
    same(call("aoti_torch_cpu_pow_Tensor_Scalar", x, 2.0, returns=1), x**2.0)
    same(call("aoti_torch_cpu_pow_Scalar", 2.0, x, returns=1), 2.0**x, x)


@pytest.mark.parametrize("dtype", ALL)
def test_abs_angle_amax_fill(dtype: torch.dtype) -> None:
    x = sample([3, 4, 2], dtype, 0).transpose(0, 2)
    if dtype is not torch.bool:
        same(call("aoti_torch_cpu_abs", x, returns=1), x.abs())
    same(call("aoti_torch_cpu_angle", x, returns=1), x.angle(), x)
    if not dtype.is_complex:
        same(call("aoti_torch_aten_amax", x, [0, -1], True, returns=1), x.amax([0, -1], True))
        same(call("aoti_torch_aten_amax", x, [], False, returns=1), x.amax())
        same(call("aoti_torch_aten_amax", x, [1], False, returns=1), x.amax(1))
    for name in ("aoti_torch_cpu_fill__Scalar", "aoti_torch_aten_fill__Scalar"):
        y = x.clone()
        call(name, y[:, 1:], 3.0)
        assert torch.equal(y[:, 1:], torch.full_like(y[:, 1:], 3)) and torch.equal(y[:, :1], x[:, :1])


def test_amax_nan_and_angle_nan() -> None:
    x = torch.tensor([[1.0, float("nan")], [-0.0, -2.0]])
    same(call("aoti_torch_aten_amax", x, [1], False, returns=1), x.amax(1))
    same(call("aoti_torch_cpu_angle", x, returns=1), x.angle())


@pytest.mark.parametrize("dtype", ALL)
def test_pow(dtype: torch.dtype) -> None:
    if dtype is torch.bool:
        return
    x, y = sample([50], dtype, 3), sample([50], dtype, 4)
    if dtype in INTS:
        y = y.abs() if dtype is torch.uint8 else y
        x = torch.where((x == 0) & (y < 0), torch.ones_like(x), x)
    got, expected = call("aoti_torch_cpu_pow_Tensor_Tensor", x, y, returns=1), x**y
    keep = (x != 0) if dtype.is_complex else torch.ones_like(x, dtype=torch.bool)
    same(got[keep], expected[keep])


@pytest.mark.parametrize("dtype", INTS)
def test_gcd(dtype: torch.dtype) -> None:
    x = torch.randint(0 if dtype is torch.uint8 else -100, 100, (6, 1)).to(dtype)
    y = torch.randint(0, 100, (1, 5)).to(dtype)
    same(call("aoti_torch_cpu_gcd", x, y, returns=1), torch.gcd(x, y))


def test_polar_and_hann_window() -> None:
    for dtype in (torch.float32, torch.float64):
        radius, phi = torch.rand(3, 4, dtype=dtype), torch.randn(4, dtype=dtype)
        same(call("aoti_torch_cpu_polar", radius, phi, returns=1), torch.polar(radius, phi.expand(3, 4)))
    for n in (0, 1, 2, 9):
        same(call("aoti_torch_cpu_hann_window", n, *NONE, returns=1), torch.hann_window(n))
    double = [Opt(CODES[torch.float64], "int32"), None, None, -1, None]
    same(call("aoti_torch_cpu_hann_window", 9, *double, returns=1), torch.hann_window(9, dtype=torch.float64))


def test_factories() -> None:
    half = [Opt(CODES[torch.float16], "int32"), None, None, -1, None]
    same(call("aoti_torch_aten_full", [2, 3], 1.5, *half, returns=1), torch.full((2, 3), 1.5, dtype=torch.float16))
    x = torch.zeros(1, dtype=torch.int32)
    same(call("aoti_torch_aten_new_zeros", x, [2, 2], *NONE, returns=1), x.new_zeros(2, 2))
    assert call("aoti_torch_aten_new_empty", x, [0, 2], *half, returns=1).dtype is torch.float16
    same(call("aoti_torch_cpu__efficientzerotensor", [3], *NONE, returns=1), torch.zeros(3))


def test_a_large_sum_is_parallel_and_right() -> None:
    x, y = torch.rand(300, 200), torch.rand(200, 300).t()
    same(call("aoti_torch_cpu_add_Tensor", x, y, 0.5, returns=1), torch.add(x, y, alpha=0.5))


def test_errors() -> None:
    x, flags = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
    cases: list[tuple[str, tuple[Any, ...], str]] = [
        ("cpu_add_Tensor", (x, torch.zeros(2), 1.0), r"add: shapes \[2, 3\] and \[2\] do not broadcast together"),
        ("cpu_add_Tensor", (x.int(), x.int(), 0.5), "add: 'alpha' is 0.5, expected a whole number for dtype int32"),
        ("aten_subtract_Tensor", (flags, flags, 1.0), "subtract: subtraction of bool tensors is not supported"),
        ("cpu_abs", (flags,), "abs: dtype bool is not supported"),
        ("cpu_gcd", (x, x), "gcd: dtype float32 is not supported, expected an integer type"),
        ("cpu_mul_Tensor", (x.to(torch.uint16), x.int()), "uint16 and int32 have no common dtype"),
        ("aten_amax", (torch.zeros(0, 2), [0], False), r"amax: dimension 0 of shape \[0, 2\] is empty"),
        ("cpu_polar", (x, x.double()), "polar: 'abs' and 'angle' must both be float32 or float64"),
        ("aten_full", ([2], 1.0, Opt(99, "int32"), *NONE[1:]), "full: unknown dtype code 99"),
        (
            "cpu_mul_Scalar",
            (torch.rand([3] * 13)[(slice(None, None, 2),) * 13], 2.0),
            r"mul: shape .* has more dimensions than the kernels take \(12 after merging\)",
        ),
    ]
    with warnings.catch_warnings():
        for name, args, text in cases:
            with pytest.raises(ShimError, match=text):
                call(f"aoti_torch_{name}", *args, returns=1)
