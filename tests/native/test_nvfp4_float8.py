"""The bound that docs/quantization.md gives for FP8 GEMMs, on the CPU, where sums are exact."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_float8 import most_apart, rows_in_float8, weight_in_float8
from tests.native.nvfp4_weights import BF16, F16, F32, random_weight
from untorch.ops.nvfp4_layout import dequantize_nvfp4
from untorch.quant import quantize_nvfp4


def w8a8_gemm(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, world: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float8, exact, and how far they may be apart."""
    (rows, of_rows), (columns, of_columns) = rows_in_float8(x), weight_in_float8(packed, scales, world)
    got = (rows.double() @ columns.double().t()) * of_rows * of_columns
    dense = dequantize_nvfp4(packed, scales, world, torch.float64)
    return got, x.double() @ dense.t(), most_apart(x.double(), dense, of_rows, of_columns)


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 5), n=st.integers(1, 20), blocks=st.integers(1, 20), dtype=st.sampled_from([BF16, F16, F32]),
    spread=st.integers(0, 12), outlier=st.sampled_from([1.0, 100.0, 1000.0]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_bound(m: int, n: int, blocks: int, dtype: torch.dtype, spread: int, outlier: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = 16 * blocks
    packed, scales = random_weight(n, k, seed=seed)
    x = torch.randn(m, k, generator=generator) * 2.0 ** -torch.randint(0, spread + 1, (m, k), generator=generator)
    x[:, 0] *= outlier
    got, exact, apart = w8a8_gemm(x.to(dtype), packed, scales, torch.rand(n, generator=generator) + 0.01)
    assert bool(torch.all((got - exact).abs() <= apart))


def test_errors_of_long_sums_are_far_less() -> None:
    generator = torch.Generator().manual_seed(0)
    made = quantize_nvfp4(torch.randn(64, 4096, generator=generator) / 64)
    x = torch.randn(64, 4096, generator=generator).to(BF16)
    got, exact, _ = w8a8_gemm(x, made.packed, made.block_scale, made.global_scale)
    assert 0.02 < float(torch.linalg.vector_norm(got - exact) / torch.linalg.vector_norm(exact)) < 0.05
