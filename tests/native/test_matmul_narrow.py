"""Grouped, int8 and float8 GEMM and addmm with an activation, against eager PyTorch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import shim
import torch
from shim import I32, Opt, ShimError, call

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALVES = [torch.bfloat16, torch.float16]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(expected.dtype, 2e-5)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 4, 5), (40, 50, 60), (1, 1, 1), (3, 4, 0), (0, 4, 2)])
@pytest.mark.parametrize("columns", [False, True])
def test_int_mm(m: int, n: int, k: int, columns: bool, dtype: torch.dtype) -> None:
    a = torch.randint(-128 if dtype == torch.int8 else 0, 128, (m, k)).to(dtype)
    b = torch.randint(-128, 128, (k, n)).to(torch.int8)
    if columns:
        b = b.t().contiguous().t()
    out = torch.full((m, n), 7, dtype=torch.int32)
    call("aoti_torch_cpu__int_mm_out", out, a, b)
    assert torch.equal(out, (a.long() @ b.long()).int())


def test_int_mm_errors() -> None:
    x, out = torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 2, dtype=torch.int32)
    with pytest.raises(ShimError, match="_int_mm: argument 'mat2' must be int8, got uint8"):
        call("aoti_torch_cpu__int_mm_out", out, x, x.to(torch.uint8))
    with pytest.raises(ShimError, match="_int_mm: argument 'self' must be int8 or uint8, got int32"):
        call("aoti_torch_cpu__int_mm_out", out, out, x)
    with pytest.raises(ShimError, match="_int_mm: argument 'out' must be int32, got int8"):
        call("aoti_torch_cpu__int_mm_out", x, x, x)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_weight_int8pack_mm(dtype: torch.dtype) -> None:
    x, w, s = torch.randn(9, 40).to(dtype), torch.randint(-128, 128, (33, 40)).to(torch.int8), torch.rand(33).to(dtype)
    close(
        call("aoti_torch_cpu__weight_int8pack_mm", x, w, s, returns=1),
        (x.float() @ w.float().t() * s.float()).to(dtype),
    )
    with pytest.raises(ShimError, match=r"argument 'scales' must be \w+ of shape \[33\], got \w+ of shape \[32\]"):
        call("aoti_torch_cpu__weight_int8pack_mm", x, w, s[:32], returns=1)


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> Any:
    return call("aoti_torch_cpu__grouped_mm", a, b, Opt(offs), Opt(None), Opt(None, "int32"), returns=1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        ((8, 16), (3, 16, 24), [3, 3, 8]),
        ((8, 16), (2, 10, 16), [1, 8]),
        ((2, 8, 16), (2, 16, 24), None),
        ((2, 8, 16), (2, 10, 16), None),
        ((8, 16), (16, 24), [8, 16]),
        ((2, 8, 16), (16, 24), [8, 24]),
    ],
)
def test_grouped_mm(a: tuple[int, ...], b: tuple[int, ...], ends: list[int] | None, dtype: torch.dtype) -> None:
    x, y = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    if b[-1] == a[-1]:
        y = y.transpose(1, 2)
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    got, expected = grouped(x, y, offs), torch._grouped_mm(x, y, offs=offs)
    close(got, expected)
    if expected.is_contiguous():  # to_torch keeps dense strides only
        assert got.stride() == expected.stride()


def test_grouped_mm_rows_behind_the_last_group_are_zero() -> None:
    got = grouped(torch.ones(5, 8), torch.ones(2, 8, 4), torch.tensor([1, 3], dtype=torch.int32))
    assert torch.equal(got[:3], torch.full((3, 4), 8.0)) and not got[3:].any()


def moe_grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> Any:
    return call("aoti_torch_cpu_moe_grouped_mm", x, w, ends, returns=1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("ends", [[0, 4, 4, 9], [11, 11, 11, 11], [0, 0, 0, 0]])
def test_moe_grouped_mm(ends: list[int], transposed: bool, dtype: torch.dtype) -> None:
    """Contiguous, also where rows are no multiple of 16 bytes; rows behind the last group are 0."""
    x = torch.randn(11, 7).to(dtype)
    w = torch.randn(4, 5, 7).to(dtype).mT if transposed else torch.randn(4, 7, 5).to(dtype)
    got = moe_grouped(x, w, torch.tensor(ends, dtype=torch.int32))
    expected, start = torch.zeros(11, 5, dtype=dtype), 0
    for g, end in enumerate(ends):
        expected[start:end] = x[start:end] @ w[g]
        start = end
    close(got, expected)
    assert got.stride() == (5, 1)


# Tails of every tile: columns, rows, an odd k; strides that are no multiple of anything.
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("n", "k"), [(45, 67), (32, 64), (16, 33), (81, 1), (4, 700)])
def test_moe_grouped_mm_tiles(n: int, k: int, transposed: bool, dtype: torch.dtype) -> None:
    ends = [1, 4, 4, 11, 28, 31]
    x = torch.randn(33, k + 3).to(dtype)[:, 1 : k + 1]
    w = torch.randn(6, n, k + 1).to(dtype)[..., 1:].mT if transposed else torch.randn(6, k, n + 1).to(dtype)[..., 1:]
    got = moe_grouped(x, w, torch.tensor(ends, dtype=torch.int32))
    start = 0
    for g, end in enumerate(ends):
        close(got[start:end], x[start:end] @ w[g])
        start = end
    assert not got[start:].any()


# Groups of few rows beside others of many, which AMX multiplies; several of its blocks of rows, columns and k.
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("n", "k"), [(520, 64), (40, 1100), (3, 32), (300, 31)])
def test_moe_grouped_mm_of_many_rows(n: int, k: int, transposed: bool) -> None:
    ends = [7, 15, 15, 24, 56, 330, 331]
    x = torch.randn(331, k + 1).bfloat16()[:, 1:]
    w = torch.randn(7, n, k).bfloat16().mT if transposed else torch.randn(7, k, n).bfloat16()
    got = moe_grouped(x, w, torch.tensor(ends, dtype=torch.int32))
    start = 0
    for g, end in enumerate(ends):
        expected = x[start:end].float() @ w[g].float()
        torch.testing.assert_close(got[start:end].float(), expected, rtol=2**-7, atol=1e-3)
        start = end


def test_moe_grouped_mm_errors() -> None:
    x, w, ends = torch.ones(4, 8), torch.ones(2, 8, 4), torch.tensor([1, 4], dtype=torch.int32)
    shapes = "moe_grouped_mm: 'input' must be [tokens, K] and 'weight' [experts, K, N] of its dtype, got float32 "
    for given, text in (
        ((x.double(), w, ends), "moe_grouped_mm: argument 'input' must be float32, bfloat16 or float16, got float64"),
        ((x[None], w, ends), shapes + "[1, 4, 8] and float32 [2, 8, 4]"),
        ((x, w[:, 1:], ends), shapes + "[4, 8] and float32 [2, 7, 4]"),
        ((x, w.half(), ends), shapes + "[4, 8] and float16 [2, 8, 4]"),
        ((x, w, ends.long()), "moe_grouped_mm: argument 'offs' must be int32, got int64"),
        ((x, w, ends[:1]), "moe_grouped_mm: argument 'offs' must have 2 entries, got 1"),
        ((x, w, ends.flip(0)), "moe_grouped_mm: 'offs' must not decrease and stay within 4, got 1 at 1"),
        ((x, w, ends * 2), "moe_grouped_mm: 'offs' must not decrease and stay within 4, got 8 at 1"),
    ):
        with pytest.raises(ShimError) as caught:
            moe_grouped(*given)
        assert str(caught.value) == text


def test_grouped_mm_errors() -> None:
    x, w = torch.ones(4, 8), torch.ones(2, 8, 4)
    for offs, text in (
        (None, "_grouped_mm: 'offs' is needed with a 2-D operand"),
        (torch.tensor([1, 4]), "_grouped_mm: argument 'offs' must be int32, got int64"),
        (
            torch.tensor([3, 2], dtype=torch.int32),
            "_grouped_mm: 'offs' must not decrease and stay within 4, got 2 at 1",
        ),
        (
            torch.tensor([3, 5], dtype=torch.int32),
            "_grouped_mm: 'offs' must not decrease and stay within 4, got 5 at 1",
        ),
        (torch.tensor([4], dtype=torch.int32), "_grouped_mm: argument 'offs' must have 2 entries, got 1"),
    ):
        with pytest.raises(ShimError) as caught:
            grouped(x, w, offs)
        assert str(caught.value) == text


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2])
@pytest.mark.parametrize(("a_type", "b_type"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_mm(rowwise: bool, a_type: torch.dtype, b_type: torch.dtype, out_dtype: torch.dtype | None) -> None:
    a, b = torch.randn(7, 32).to(a_type), torch.randn(12, 32).to(b_type).t()
    scales = (torch.rand(7, 1) + 0.5, torch.rand(1, 12) + 0.5) if rowwise else (torch.tensor(0.3), torch.tensor(0.2))
    code = None if out_dtype is None else shim.CODES[out_dtype]
    got = call("aoti_torch_cpu__scaled_mm", a, b, *scales, Opt(None), Opt(None), Opt(code, "int32"), I32(0), returns=1)
    exact = (a.float() @ b.float()) * scales[0] * scales[1]
    expected = exact.to(out_dtype or a_type)
    assert got.dtype == expected.dtype
    step = {E4M3: 0.13, E5M2: 0.26}.get(got.dtype, 1e-2)
    torch.testing.assert_close(got.float(), expected.float(), rtol=step, atol=1e-3)
    assert (got.float() == expected.float()).float().mean() > (0.97 if got.dtype != torch.float32 else 0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_float8_value_survives(dtype: torch.dtype) -> None:
    """Decoding and encoding, through a GEMM with the identity."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = values.float().isfinite()
    a = values.clone()
    a.view(torch.uint8)[~finite] = 0
    one = torch.ones(())
    code = Opt(shim.CODES[dtype], "int32")
    got = call(
        "aoti_torch_cpu__scaled_mm",
        a.view(256, 1),
        torch.ones(1, 1).to(dtype),
        one,
        one,
        Opt(None),
        Opt(None),
        code,
        I32(0),
        returns=1,
    )
    assert torch.equal(got.view(256).float(), a.float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float8_rounding(dtype: torch.dtype) -> None:
    """Ties, subnormals and overflow, as torch rounds them: values reached by scaling."""
    scale = torch.tensor(
        [2.0**e * f for e in range(-24, 20) for f in (1.0, 1.03125, 1.0625, 1.125, 1.1875, 1.25, 1.9375)]
    )
    scale = scale.view(-1, 1)
    one = torch.ones(1, 1).to(dtype)
    got = call(
        "aoti_torch_cpu__scaled_mm", one.expand(len(scale), 1), one, scale, torch.ones(1, 1), Opt(None), Opt(None),
        Opt(shim.CODES[dtype], "int32"), I32(0), returns=1,
    )  # fmt: skip
    torch.testing.assert_close(got.float(), scale.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_scaled_mm_bias_result_scale_and_out() -> None:
    a, b, bias = torch.randn(7, 32).to(E4M3), torch.randn(12, 32).to(E4M3).t(), torch.randn(12)
    one, five = torch.ones(()), torch.tensor(5.0)
    out = torch.empty(7, 12)
    call("aoti_torch_cpu__scaled_mm_out", out, a, b, one, one, Opt(bias), Opt(five), Opt(6, "int32"), I32(0))
    close(out, torch._scaled_mm(a, b, one, one, bias=bias, scale_result=five, out_dtype=torch.float32))
    got = call("aoti_torch_cpu__scaled_mm", a, b, one, one, Opt(None), Opt(five), Opt(24, "int32"), I32(0), returns=1)
    expected = torch._scaled_mm(a, b, one, one, scale_result=five, out_dtype=E4M3)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.13, atol=2e-3)


def test_deprecated_names_of_scaled_mm() -> None:
    a, b = torch.randn(16, 32).to(E4M3), torch.randn(48, 32).to(E4M3).t()
    half, two, bias, code = torch.tensor(0.5), torch.tensor(2.0), torch.randn(48).bfloat16(), Opt(15, "int32")
    expected = torch._scaled_mm(a, b, half, two, bias=bias, out_dtype=torch.bfloat16)
    close(call("aoti_torch__scaled_mm_v2", a, b, half, two, bias, None, code, I32(0), returns=1), expected)
    # The second result is left alone, as by PyTorch.
    handles = [shim.handle(t) for t in (a, b, bias, half, two)]
    first, second = ctypes.c_void_p(), ctypes.c_void_p(1234)
    shim.raise_on(
        shim.lib.aoti_torch__scaled_mm(
            *handles[:3], ctypes.byref(ctypes.c_int32(15)), *handles[3:], None, ctypes.c_int8(0), ctypes.byref(first),
            ctypes.byref(second),
        )
    )  # fmt: skip
    close(shim.to_torch(first), expected)
    assert second.value == 1234
    for h in (*handles, first):
        shim.delete(h)


def test_scaled_mm_errors() -> None:
    a, one = torch.ones(2, 2).to(E4M3), torch.ones(())
    rest = (Opt(None), Opt(None), Opt(6, "int32"), I32(0))
    with pytest.raises(ShimError, match="operands must be float8_e4m3fn or float8_e5m2, got float32"):
        call("aoti_torch_cpu__scaled_mm", torch.ones(2, 2), torch.ones(2, 2), one, one, *rest, returns=1)
    with pytest.raises(ShimError, match="argument 'scale_b' must hold one value"):
        call("aoti_torch_cpu__scaled_mm", a, a, torch.ones(2, 1), one, *rest, returns=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("gelu", [False, True])
def test_addmm_activation(gelu: bool, dtype: torch.dtype) -> None:
    b, x, w = torch.randn(5).to(dtype), torch.randn(4, 8).to(dtype), torch.randn(8, 5).to(dtype)
    got = call("aoti_torch_cpu__addmm_activation", b, x, w, 0.5, 2.0, gelu, returns=1)
    close(got, torch._addmm_activation(b, x, w, beta=0.5, alpha=2.0, use_gelu=gelu))


def test_addmm_activation_refuses_integers() -> None:
    x = torch.ones(2, 2, dtype=torch.int64)
    with pytest.raises(ShimError, match="_addmm_activation: operands must be .*, got int64"):
        call("aoti_torch_cpu__addmm_activation", x, x, x, 1.0, 1.0, False, returns=1)
