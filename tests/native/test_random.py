"""The random shims against torch's CPU generator after the same seed."""

from __future__ import annotations

import ctypes
import math
import pathlib
from typing import Any

import pytest
import torch
from shim import CODES, Opt, ShimError, call, lib

lib.untorch_initial_seed.restype = ctypes.c_uint64
# On Intel CPUs torch draws exponential and scalar bernoulli numbers from MKL: those are compared by frequency only.
INTEL = "GenuineIntel" in pathlib.Path("/proc/cpuinfo").read_text()
NONE = [None, None, None, -1, None]  # dtype, layout, device, device index, pin_memory


def options(dtype: torch.dtype | None) -> list[Any]:
    code = Opt(None if dtype is None else CODES[dtype], "int32")
    return [code, None, None, -1, None]


def seed(value: int = 42) -> None:
    torch.manual_seed(value)
    lib.untorch_manual_seed(ctypes.c_uint64(value))


def test_seed() -> None:
    assert lib.untorch_initial_seed() >= 0
    seed(2**40 + 7)
    assert lib.untorch_initial_seed() == 2**40 + 7
    assert torch.equal(call("aoti_torch_cpu_rand", [5], *NONE, returns=1), torch.rand(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [[], [1000], [3, 0], [7, 5]])
def test_rand_is_bit_equal(dtype: torch.dtype, shape: list[int]) -> None:
    seed()
    for _ in range(2):
        assert torch.equal(
            call("aoti_torch_cpu_rand", shape, *options(dtype), returns=1), torch.rand(shape, dtype=dtype)
        )


@pytest.mark.parametrize("high", [1, 10, 2**28 - 1, 2**28, 2**31, 2**32, 2**40])
def test_randint_is_bit_equal(high: int) -> None:
    seed()
    assert torch.equal(call("aoti_torch_cpu_randint", high, [100], *NONE, returns=1), torch.randint(high, (100,)))
    got = call("aoti_torch_cpu_randint_low", -high, high, [9, 3], *NONE, returns=1)
    assert torch.equal(got, torch.randint(-high, high, (9, 3)))
    assert torch.equal(call("aoti_torch_cpu_rand", [3], *NONE, returns=1), torch.rand(3))


def test_randint_dtypes_and_out() -> None:
    for dtype in (torch.int32, torch.uint8, torch.float32, torch.float16, torch.bool):
        seed()
        high = 2 if dtype is torch.bool else 100
        got = call("aoti_torch_cpu_randint", high, [50], *options(dtype), returns=1)
        assert torch.equal(got, torch.randint(high, (50,), dtype=dtype))
    for out in (torch.zeros(4, 5, dtype=torch.int64), torch.zeros(5, 4, dtype=torch.int64).t()):
        seed()
        call("aoti_torch_cpu_randint_low_out", out, 3, 2**62, [4, 5])
        assert torch.equal(out, torch.randint(3, 2**62, (4, 5), out=torch.empty_like(out)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("n", [1, 3, 15, 16, 20, 1000])
def test_randn(dtype: torch.dtype, n: int) -> None:
    seed()
    got, expected = call("aoti_torch_cpu_randn", [n], *options(dtype), returns=1), torch.randn(n, dtype=dtype)
    if n < 8:
        assert torch.equal(got, expected)
    else:
        # From 16 on torch uses vector approximations of log, sin and cos: equal to rounding.
        torch.testing.assert_close(got, expected, rtol=1e-5 if dtype in (torch.float32, torch.complex64) else None,
                                   atol=2e-6 if dtype in (torch.float32, torch.complex64) else None)  # fmt: skip
    # The cached half of a pair carries over to the next call.
    assert torch.equal(call("aoti_torch_cpu_randn", [2], *NONE, returns=1), torch.randn(2))


def test_like_forms_keep_the_layout() -> None:
    x = torch.empty(6, 4).t()
    seed()
    got, expected = call("aoti_torch_cpu_rand_like", x, *NONE, None, returns=1), torch.rand_like(x)
    assert torch.equal(got, expected) and got.stride() == expected.stride()
    got, expected = call("aoti_torch_cpu_randn_like", x, *NONE, None, returns=1), torch.randn_like(x)
    assert torch.equal(got, expected)
    got, expected = call("aoti_torch_cpu_randint_like", x, 9, *NONE, None, returns=1), torch.randint_like(x, 9)
    assert torch.equal(got, expected)
    got = call("aoti_torch_cpu_randint_like_low_dtype", x, 3, 9, *NONE, None, returns=1)
    assert torch.equal(got, torch.randint_like(x, 3, 9))
    got = call("aoti_torch_cpu_rand_like_generator", x, None, *NONE, None, returns=1)
    assert torch.equal(got, torch.rand_like(x))
    got = call("aoti_torch_cpu_randn_generator", [3], None, *NONE, returns=1)
    assert torch.equal(got, torch.randn(3))


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_randperm_is_bit_equal(n: int) -> None:
    seed()
    assert torch.equal(call("aoti_torch_cpu_randperm", n, *NONE, returns=1), torch.randperm(n))
    got = call("aoti_torch_cpu_randperm", n, *options(torch.int32), returns=1)
    assert torch.equal(got, torch.randperm(n, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_uniform_normal_exponential(dtype: torch.dtype) -> None:
    x = torch.empty(33, dtype=dtype)
    seed()
    got = call("aoti_torch_cpu_uniform", x, -2.5, 7.1, None, returns=1)
    assert torch.equal(got, x.uniform_(-2.5, 7.1))
    got = call("aoti_torch_cpu_normal_functional", x, 3.0, 2.0, None, returns=1)
    torch.testing.assert_close(got, x.normal_(3.0, 2.0), rtol=None if dtype is torch.float64 else 1e-2,
                               atol=None if dtype is torch.float64 else 1e-2)  # fmt: skip
    big = torch.empty(20000, dtype=dtype)
    seed()
    drawn = call("aoti_torch_cpu_exponential", big, 2.0, None, returns=1)
    assert INTEL or torch.equal(drawn, big.exponential_(2.0))
    drawn = drawn.double()
    assert drawn.min() >= 0
    assert abs(drawn.mean().item() - 0.5) < 0.02
    assert abs((drawn > math.log(2) / 2).double().mean().item() - 0.5) < 0.02


def test_bernoulli() -> None:
    x = torch.empty(20000)
    seed()
    call("aoti_torch_cpu_bernoulli__float", x, 0.3, None)
    assert INTEL or torch.equal(x, torch.empty(20000).bernoulli_(0.3))
    assert set(x.tolist()) == {0.0, 1.0}
    assert abs(x.mean().item() - 0.3) < 0.02
    for p in (torch.rand(50), torch.rand(50, dtype=torch.float64), torch.tensor(0.4)):
        seed()
        got = torch.empty(50)
        call("aoti_torch_cpu_bernoulli__Tensor", got, p, None)
        assert torch.equal(got, torch.empty(50).bernoulli_(p))


def test_generator_handle() -> None:
    generator = ctypes.c_void_p()
    assert lib.torch_new_generator_handle(None, ctypes.byref(generator)) == 0
    kind, index = ctypes.c_int32(9), ctypes.c_int32(9)
    assert lib.torch_generator_get_device(generator, ctypes.byref(kind), ctypes.byref(index)) == 0
    assert (kind.value, index.value) == (0, -1)
    seed()
    copy = ctypes.c_void_p()
    assert lib.torch_new_generator_handle(generator, ctypes.byref(copy)) == 0
    out = ctypes.c_void_p()
    size = (ctypes.c_int64 * 1)(4)
    assert (
        lib.aoti_torch_cpu_rand_generator(
            size, ctypes.c_int64(1), ctypes.byref(copy), None, None, None, -1, None, ctypes.byref(out)
        )
        == 0
    )
    from shim import delete, to_torch

    assert torch.equal(to_torch(out), torch.rand(4))
    delete(out)
    for handle in (copy, generator):
        assert lib.torch_delete_generator(handle) == 0


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("randint", (0, [3], *NONE), "randint: 'low' is 0, expected less than 'high' 0"),
        ("randint", (300, [3], *options(torch.uint8)), r"randint: the range \[0, 300\) does not fit dtype uint8"),
        ("rand", ([3], *options(torch.int64)), "rand: dtype int64 is not supported, expected a floating type"),
        ("randperm", (-1, *NONE), "randperm: 'n' is -1, expected 0 or more"),
        ("uniform", (torch.empty(1), 2.0, 1.0, None), "uniform: 'from' is 2, expected at most 'to' 1"),
        ("exponential", (torch.empty(1), 0.0, None), "exponential: 'lambd' is 0, expected more than 0"),
        ("normal_functional", (torch.empty(1), 0.0, -1.0, None), "normal: 'std' is -1, expected 0 or more"),
        ("rand", ([2], None, None, Opt(1, "int32"), 0, None), "rand: argument 'device' is cuda, expected cpu"),
    ],
)
def test_errors(name: str, args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ShimError, match=text):
        call(f"aoti_torch_cpu_{name}", *args, returns=1)
    with pytest.raises(ShimError, match="bernoulli_: 'p' holds 1.5, expected 0 to 1"):
        call("aoti_torch_cpu_bernoulli__float", torch.empty(2), 1.5, None)
    bernoulli = "aoti_torch_cpu_bernoulli__Tensor"
    with pytest.raises(ShimError, match="bernoulli_: 'p' holds nan, expected 0 to 1"):
        call(bernoulli, torch.empty(2), torch.tensor([0.5, math.nan]), None)
    with pytest.raises(ShimError, match="bernoulli_: dtype int64 of 'p' is not supported, expected a floating type"):
        call(bernoulli, torch.empty(2), torch.ones(2, dtype=torch.int64), None)
    with pytest.raises(ShimError, match=r"bernoulli_: 'p' of shape \[3\] does not broadcast to \[2\]"):
        call(bernoulli, torch.empty(2), torch.empty(3), None)
