"""The linear layer of NVFP4 weights with int8 activations on the CPU, at every level: against exact integers, or rounded
to bfloat16 by AMX.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.operands import drawn_rows
from tests.native.shim import Opt, ShimError, call
from tests.native.test_w4a8 import check_error, check_rows, check_threads, multiplied
from tests.native.test_w4a8 import pack as pack_int4

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def pack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, k] as words [ceil(n/16)][k/8][16], scales [n, k/16] as [ceil(n/16)][k/16][16]."""
    n, k = codes.shape
    panels = -(-n // 16)
    words, _ = pack_int4(codes, torch.zeros(n, k // 32, 2))
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, 0, 0, panels * 16 - n))
    return words, padded.reshape(panels, 16, k // 16).transpose(1, 2).contiguous().view(E4M3)


class Weight:
    """A random weight: packed, and in float64 [n, k]. Scales have all of their values but NaN, of both signs."""

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (n, k), generator=generator)
        scales = torch.randint(0, 127, (n, k // 16), generator=generator, dtype=torch.uint8)
        scales |= torch.randint(0, 2, scales.shape, generator=generator, dtype=torch.uint8) << 7
        self.take(codes, scales.view(E4M3), torch.rand(n, generator=generator) * 0.01 + 0.001)

    def take(self, codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> None:
        self.n, self.global_scale = codes.shape[0], global_scale
        self.packed, self.scales = pack(codes, scales)
        self.dense = VALUES[codes] * scales.double().repeat_interleave(16, 1) * global_scale.double()[:, None]


def linear(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    got: torch.Tensor = call(
        "aoti_torch_cpu_nvfp4_int8_linear", x, w.packed, w.scales, w.global_scale, w.n, Opt(bias), returns=1
    )  # fmt: skip
    return got


def check(got: torch.Tensor, x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> None:
    assert got.shape == (*x.shape[:-1], w.n)
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    u = multiplied(x, w.dense.shape[1])  # products of codes and block scales are exact in bfloat16
    want = u @ w.dense.t() + (0.0 if bias is None else bias.double())
    size = u.abs() @ w.dense.abs().t() + (0.0 if bias is None else bias.double().abs())  # float32 sums the blocks
    rounding = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}[x.dtype]
    least = torch.finfo(x.dtype).smallest_normal * rounding
    assert torch.all((got.double() - want).abs() <= want.abs() * rounding + size * 2.0**-20 + least)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_nvfp4_int8_linear(data: st.DataObject) -> None:
    draw = data.draw
    n, k = draw(st.integers(1, 150)), 32 * draw(st.integers(1, 16))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    w = Weight(n, k, draw(st.integers(0, 99)))
    width = k - draw(st.integers(0, 31))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = drawn_rows(draw, random, draw(st.integers(0, 20) | st.integers(21, 90)), width)
    bias = draw(st.sampled_from([None, random(n), random(2 * n)[::2]]))
    check(linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize("n", [15, 16, 17, 64, 130])
def test_rows(n: int) -> None:
    w = Weight(n, 256, seed=n)
    for m in (1, 2, 3, 4, 5, 6, 7, 13, 64):
        x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m))
        check(linear(x, w), x, w)


def test_the_largest_sums() -> None:
    """Every product at its extreme, of both signs: nothing saturates on the way."""
    for code in (7, 15):
        w = Weight(32, 256)
        w.take(torch.full((32, 256), code), torch.full((32, 16), 448.0).to(E4M3), torch.ones(32))
        for sign in (1.0, -1.0):
            for m in (7, 40):
                got = linear(torch.full((m, 256), 127.0 * sign), w)
                assert torch.equal(got, torch.full((m, 32), 127.0 * sign * float(VALUES[code]) * 448 * 256))


def test_every_code_and_every_scale() -> None:
    """Subnormal scales and the largest, of both signs, are exact."""
    bits = torch.arange(256, dtype=torch.uint8)
    scales = bits[(bits & 127) != 127].view(E4M3)  # 254: 127 rows of two blocks
    w = Weight(127, 32)
    codes = (torch.arange(127 * 32) * 7 % 16).reshape(127, 32)
    w.take(codes, scales.reshape(127, 2), torch.ones(127))
    x = 127.0 * torch.eye(32)
    want = w.dense.t() * 127
    assert torch.equal(linear(x, w).double(), want)
    for k in range(32):
        assert torch.equal(linear(x[k : k + 1], w).double(), want[k : k + 1])


@pytest.mark.parametrize("m", [6, 40])
def test_rows_that_are_not_finite_or_tiny(m: int) -> None:
    w = Weight(20, 64)
    x = torch.randn(m, 64)
    clean = linear(x, w)
    x[1, 40], x[2, 3], x[4, 63] = NAN, INF, -INF
    got = linear(x, w)
    assert torch.isnan(got).all(1).nonzero().flatten().tolist() == [1, 2, 4]
    finite = ~torch.isnan(got).any(1)
    assert finite.sum() == m - 3
    assert torch.equal(got[finite], clean[finite])
    assert torch.isfinite(linear(torch.full((m, 64), 1e-42), w)).all()
    assert torch.equal(linear(torch.zeros(m, 64), w).abs(), torch.zeros(m, 20))


@pytest.mark.parametrize("m", [31, 45])
def test_a_row_alone_gives_what_it_gives_among_others(m: int) -> None:
    w = Weight(200, 512)
    check_rows(lambda some: linear(some, w), torch.randn(m, 512), range(m), (2, 3, 4, 5, 6, 11, m - 12, m - 1))


@pytest.mark.parametrize("k", [1056, 8192])
def test_many_rows_of_many_blocks(k: int) -> None:
    """Several blocks of K and M."""
    w = Weight(33, k)
    x = torch.randn(290, k - 7, generator=torch.Generator().manual_seed(k))
    whole = check_rows(lambda some: linear(some, w), x, (0, 15, 16, 127, 128, 255, 256, 289), (15, 16, 17, 33, 49))
    check(whole, x, w)


def test_error() -> None:
    w = Weight(48, 1024)
    check_error(lambda x: linear(x, w), w.dense)


@pytest.mark.slow
@pytest.mark.unsanitized
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    check_threads("test_nvfp4_int8", "1030, 1024")


def operands(**changed: Any) -> list[Any]:
    w = Weight(20, 64)
    given = {
        "x": torch.ones(3, 64), "weight": w.packed, "scales": w.scales, "global": w.global_scale, "n": 20, "bias": None,
    } | changed  # fmt: skip
    return [given["x"], given["weight"], given["scales"], given["global"], given["n"], Opt(given["bias"])]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": None}, "argument 'x' is null"),
        ({"weight": None}, "argument 'weight' is null"),
        ({"scales": None}, "argument 'block_scale' is null"),
        ({"global": None}, "argument 'global_scale' is null"),
        ({"x": torch.ones(3, 64).double()}, "argument 'x' must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.ones(64, 3).t()},
         "argument 'x' must have a contiguous last dimension, got shape [3, 64] with strides [1, 3]"),
        ({"n": -1}, "out_features must not be negative, got -1"),
        ({"weight": torch.ones(2, 8, 16)}, "argument 'weight' must be int32, got float32"),
        ({"weight": torch.ones(2, 8, 8, dtype=torch.int32)},
         "argument 'weight' must be contiguous of shape [2, 8, 16] for 64 features, 20 outputs, got shape [2, 8, 8] "
         "with strides [64, 8, 1]"),
        ({"x": torch.ones(3, 65)}, "argument 'weight' must be contiguous of shape [2, 12, 16] for 65 features"),
        ({"scales": torch.ones(2, 4, 16)}, "argument 'block_scale' must be float8_e4m3fn, got float32"),
        ({"scales": torch.ones(2, 2, 16).to(E4M3)}, "argument 'block_scale' must be contiguous of shape [2, 4, 16]"),
        ({"global": torch.ones(20).double()}, "argument 'global_scale' must be float32, got float64"),
        ({"global": torch.ones(1)}, "argument 'global_scale' must be contiguous of shape [20]"),
        ({"bias": torch.ones(19)}, "argument 'bias' must have shape [20], got [19]"),
        ({"bias": torch.ones(20, dtype=BF16)}, "argument 'bias' must be float32 like 'x', got bfloat16"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("aoti_torch_cpu_nvfp4_int8_linear", *operands(**changed), returns=1)
    assert str(error.value).startswith("nvfp4_int8_linear: ")
    assert text in str(error.value)


def test_no_place_for_the_result() -> None:
    with pytest.raises(ShimError, match="^nvfp4_int8_linear: output pointer is null$"):
        call("aoti_torch_cpu_nvfp4_int8_linear", *operands(), None)


def test_no_rows_no_columns_and_no_features() -> None:
    w = Weight(16, 64)
    assert linear(torch.ones(2, 0, 64), w).shape == (2, 0, 16)
    w.n, w.packed, w.scales, w.global_scale = 0, w.packed[:0], w.scales[:0], w.global_scale[:0]
    assert linear(torch.ones(3, 64), w).shape == (3, 0)
    w.n, w.packed, w.scales = 5, torch.zeros(1, 0, 16, dtype=torch.int32), torch.zeros(1, 0, 16).to(E4M3)
    w.global_scale, bias = torch.ones(5), torch.randn(5)
    assert torch.equal(linear(torch.ones(3, 0), w, bias), bias.expand(3, 5))
