"""Packed linear layers and _linear_pointwise: shapes, blocks, activations, residuals and error texts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import shim
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import Opt, ShimError, call

NAME = "aoti_torch_cpu_untorch_packed_linear"
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


HALF = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] as [ceil(n/16), k, 16], in a half type as [ceil(n/16), ceil(k/2), 16, 2]; zero-padded."""
    n, k = weight.shape
    panels = (n + 15) // 16
    if weight.dtype in HALF:
        pairs = (k + 1) // 2
        padded = torch.zeros(panels * 16, 2 * pairs, dtype=weight.dtype)
        padded[:n, :k] = weight
        return padded.view(panels, 16, pairs, 2).transpose(1, 2).contiguous()
    padded = torch.zeros(panels * 16, k)
    padded[:n] = weight
    return padded.view(panels, 16, k).transpose(1, 2).contiguous()


def verify(x: torch.Tensor, n: int, activation: str = "none", bias: bool = True, residual: bool = True) -> None:
    g = torch.Generator().manual_seed(1)
    k = x.shape[-1]
    weight = (torch.randn(n, k, generator=g) / max(k, 1) ** 0.5).to(x.dtype)
    b = torch.randn(n, generator=g).to(x.dtype) if bias else None
    r = torch.randn(*x.shape[:-1], n, generator=g).to(x.dtype) if residual else None
    got = call(NAME, x, pack(weight), Opt(b), Opt(r), activation, n, returns=1)
    expected = ACTIVATIONS[activation](F.linear(x.double(), weight.double(), None if b is None else b.double()))
    if r is not None:
        expected = expected + r
    assert got.is_contiguous() and got.dtype == x.dtype
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(0, 70),
    st.integers(0, 60),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.booleans(),
)
def test_packed_linear(m: int, n: int, k: int, activation: str, bias: bool, residual: bool) -> None:
    verify(torch.randn(m, k, generator=torch.Generator().manual_seed(2)), n, activation, bias, residual)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 31, 128, 500])
@pytest.mark.parametrize(("n", "k"), [(384, 384), (150, 1536), (1100, 64), (17, 2100)])
def test_packed_linear_blocks(m: int, n: int, k: int) -> None:
    verify(torch.randn(m, k, generator=torch.Generator().manual_seed(2)), n, "gelu")


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(HALF),
    st.integers(0, 60),
    st.integers(0, 70),
    st.integers(0, 60),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.booleans(),
)
def test_packed_linear_half(
    dtype: torch.dtype, m: int, n: int, k: int, activation: str, bias: bool, residual: bool
) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(2)).to(dtype)
    verify(x, n, activation, bias, residual)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("m", [1, 4, 7, 12, 13, 96, 97, 300])
@pytest.mark.parametrize(("n", "k"), [(384, 384), (150, 1537), (1100, 64), (17, 4500)])
def test_packed_linear_half_blocks(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    verify(torch.randn(m, k, generator=torch.Generator().manual_seed(2)).to(dtype), n, "gelu")


@pytest.mark.parametrize("dtype", HALF)
def test_packed_linear_half_strides(dtype: torch.dtype) -> None:
    x = torch.randn(5, 43).to(dtype)
    for view in (x[:, ::2], x[:, 1:22], x[::2, :21], x.t().contiguous().t()[:, :21]):
        verify(view, 33, "silu")


# Extremes go through every width of vector: subnormals, infinities, NaN, ties, the largest.
@pytest.mark.parametrize("dtype", HALF)
def test_half_values_survive(dtype: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    got, by_rows = torch.empty(1, 1 << 16, dtype=dtype), torch.empty(1 << 16, 1, dtype=dtype)
    call("aoti_torch_cpu_mm_out", got, one, bits[None])
    call("aoti_torch_cpu_mm_out", by_rows, bits[:, None], one)
    small = bits.abs() < torch.finfo(dtype).tiny  # AVX512_BF16 takes subnormals for zero
    expected = torch.where(small, torch.zeros_like(bits), bits) if dtype == torch.bfloat16 else bits
    for result in (got.flatten(), by_rows.flatten()):
        kept = torch.where(small, torch.zeros_like(result), result) if dtype == torch.bfloat16 else result
        torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)


# Small M by dot products, large M by packed panels, each from every layout.
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("m", [1, 5, 32, 33, 130])
@pytest.mark.parametrize(("n", "k"), [(1, 40), (3, 41), (70, 33), (530, 1031)])
def test_half_gemm_layouts(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(3)
    lefts = [
        torch.randn(m, k, generator=g).to(dtype), torch.randn(k, m, generator=g).to(dtype).t(),
        torch.randn(m, 2 * k, generator=g).to(dtype)[:, ::2],
    ]  # fmt: skip
    rights = [
        torch.randn(k, n, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype).t(),
        torch.randn(k, 3 * n, generator=g).to(dtype)[:, ::3],
    ]  # fmt: skip
    for x in lefts:
        for y in rights:
            added = torch.randn(m, n, generator=g).to(dtype)
            for out in (torch.empty(m, n, dtype=dtype), torch.empty(n, m, dtype=dtype).t()):
                call("aoti_torch_cpu_addmm_out", out, added, x, y, 0.5, 2.0)
                expected = 0.5 * added.double() + 2.0 * (x.double() @ y.double())
                tolerance = TOLERANCE[dtype]
                torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * k**0.5)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 20),
        torch.randn(20),
        torch.randn(5, 40)[:, ::2],
        torch.randn(20, 5).t(),
        torch.randn(3, 4, 25)[..., 2:22],
        torch.randn(3, 8, 20)[:, ::2],
        torch.randn(4, 3, 20).transpose(0, 1),
        torch.randn(1, 1, 20).expand(3, 4, 20),
        torch.randn(3, 1, 20).expand(3, 4, 20),
        torch.randn(1, 4, 20).expand(3, 4, 20),
        torch.randn(6, 20)[1::2],
        torch.randn(1, 4, 1, 20),
    ],
    ids=lambda x: f"{list(x.shape)}-{list(x.stride())}",
)
def test_packed_linear_strides(x: torch.Tensor) -> None:
    verify(x, 33, "silu")


def test_packed_linear_takes_a_strided_residual() -> None:
    x, weight, residual = torch.randn(3, 4, 8), torch.randn(5, 8), torch.randn(4, 3, 5).transpose(0, 1)
    got = call(NAME, x, pack(weight), Opt(None), Opt(residual), "none", 5, returns=1)
    torch.testing.assert_close(got, x @ weight.t() + residual, rtol=1e-5, atol=1e-5)


def test_relu_keeps_nan() -> None:
    x = torch.tensor([[float("nan"), 1.0]])
    assert call(NAME, x, pack(torch.eye(2)), Opt(None), Opt(None), "relu", 2, returns=1).isnan().any()


@pytest.mark.unsanitized
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("m", [20, 67])
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, m: int) -> None:
    x, weight = torch.randn(m, 700).to(dtype), pack(torch.randn(200, 700).to(dtype))
    results = []
    for threads in (1, 2, 3, 5):
        shim.lib.utp_set_num_threads(threads)
        out = torch.empty(m, 700, dtype=dtype)
        call("aoti_torch_cpu_mm_out", out, x, torch.ones(700, 700).triu().to(dtype))
        results.append((call(NAME, x, weight, Opt(None), Opt(None), "gelu", 200, returns=1), out))
    shim.lib.utp_set_num_threads(2)
    for packed, plain in results[1:]:
        assert torch.equal(packed, results[0][0]) and torch.equal(plain, results[0][1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.ones(2, 8).double()}, "argument 'x' must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.ones(2, 8).half()}, "argument 'weight' must be float16, as 'x', got float32"),
        ({"bias": torch.ones(5).half()}, "argument 'bias' must be float32, as 'x', got float16"),
        ({"n": 20}, "argument 'weight' must have shape [2, 8, 16] for 8 → 20 features, got [1, 8, 16]"),
        ({"bias": torch.ones(4)}, "argument 'bias' must have shape [5], got [4]"),
        ({"residual": torch.ones(2, 4)}, "argument 'residual' must have shape [2, 5], got [2, 4]"),
        (
            {"activation": "mish"},
            "activation 'mish' is not supported, expected none, relu, gelu, gelu_tanh, silu, tanh, sigmoid, relu6, "
            "hardswish or hardsigmoid",
        ),
    ],
)
def test_packed_linear_errors(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as caught:
        call(
            NAME, change.get("x", torch.ones(2, 8)), torch.ones(1, 8, 16), Opt(change.get("bias")),
            Opt(change.get("residual")), change.get("activation", "none"), change.get("n", 5), returns=1,
        )  # fmt: skip
    assert str(caught.value) == f"packed_linear: {text}"


def linear_pointwise(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, attr: str, scalars: list[float], algorithm: str
) -> Any:
    owned = [shim.handle(t) for t in (x, w, *([] if b is None else [b]))]
    values = [ctypes.c_double(s) for s in scalars]
    pointers = (ctypes.POINTER(ctypes.c_double) * max(len(values), 1))(*(ctypes.pointer(v) for v in values))
    out = ctypes.c_void_p()
    try:
        shim.raise_on(
            shim.lib.aoti_torch_cpu__linear_pointwise(
                owned[0], owned[1], ctypes.byref(owned[2]) if b is not None else None, attr.encode(), pointers,
                ctypes.c_int64(len(values)), ctypes.byref(ctypes.c_char_p(algorithm.encode())), ctypes.byref(out),
            )
        )  # fmt: skip
        return shim.to_torch(out)
    finally:
        for handle in [*owned, *([out] if out.value else [])]:
            shim.delete(handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("attr", "scalars", "algorithm"),
    [
        ("none", [], ""), ("relu", [], ""), ("sigmoid", [], ""), ("tanh", [], ""), ("swish", [], ""),
        ("hardswish", [], ""),
        ("gelu", [], "none"), ("gelu", [], "tanh"), ("leaky_relu", [0.1], ""), ("hardtanh", [-0.5, 0.7], ""),
    ],
)  # fmt: skip
def test_linear_pointwise(attr: str, scalars: list[float], algorithm: str, dtype: torch.dtype) -> None:
    x, w, b = torch.randn(2, 3, 8).to(dtype), torch.randn(5, 8).to(dtype), torch.randn(5).to(dtype)
    for bias in (b, None):
        wide = None if bias is None else bias.float()
        expected = torch.ops.mkldnn._linear_pointwise(
            x.float(), w.float(), wide, attr, scalars, algorithm or "none"
        ).to(dtype)
        tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(
            linear_pointwise(x, w, bias, attr, scalars, algorithm), expected, rtol=tolerance, atol=tolerance
        )


def test_linear_pointwise_errors() -> None:
    x, w = torch.randn(2, 8), torch.randn(5, 8)
    with pytest.raises(ShimError, match="_linear_pointwise: post-op 'mish' is not supported, expected none, relu"):
        linear_pointwise(x, w, None, "mish", [], "")
    with pytest.raises(ShimError, match="_linear_pointwise: 'hardtanh' needs 2 scalars, got 1"):
        linear_pointwise(x, w, None, "hardtanh", [1.0], "")
    with pytest.raises(ShimError, match=r"'X' has 8 features, 'W' of shape \[5, 7\] takes 7"):
        linear_pointwise(x, w[:, :7], None, "none", [], "")


@pytest.mark.parametrize("attr", ["add", "sub", "mul"])
def test_linear_pointwise_binary(attr: str) -> None:
    x, w, b, other = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5), torch.randn(2, 5, 3).transpose(1, 2)
    got = call("aoti_torch_cpu__linear_pointwise_binary", x, other, w, Opt(b), attr, returns=1)
    expected = torch.ops.mkldnn._linear_pointwise.binary(x, other, w, b, attr)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_linear_pointwise_binary_refuses_others() -> None:
    x = torch.randn(2, 2)
    with pytest.raises(ShimError, match="_linear_pointwise_binary: binary post-op 'div' is not supported"):
        call("aoti_torch_cpu__linear_pointwise_binary", x, x, x, Opt(None), "div", returns=1)


@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12), (0, 12), (12,)])
@pytest.mark.parametrize("bias", [False, True])
def test_mkl_linear_uses_the_original_weight(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = torch.randn(shape), torch.randn(12, 5).t(), torch.randn(5) if bias else None
    packed = torch.zeros(1)  # MKL's private layout: not read
    got = call("aoti_torch_cpu__mkl_linear", x, packed, w, Opt(b), 7, returns=1)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, w, b))


def test_mkl_linear_errors() -> None:
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(ShimError, match="_mkl_linear: argument 'X' must be float32, got float64"):
        call("aoti_torch_cpu__mkl_linear", x.double(), w, w, Opt(None), 2, returns=1)
    with pytest.raises(ShimError, match=r"_mkl_linear: 'X' has 3 features, 'W' of shape \[3, 4\] takes 4"):
        call("aoti_torch_cpu__mkl_linear", x, w, w.t(), Opt(None), 2, returns=1)
