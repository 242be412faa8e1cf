"""The bound that docs/quantization.md gives for W4A4 GEMMs, on the CPU, where sums are exact."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_float4 import most_apart, rounded_rows
from tests.native.nvfp4_weights import BF16, F16, F32, random_weight
from untorch.ops.nvfp4_layout import dequantize_nvfp4
from untorch.quant import quantize_nvfp4


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 5), n=st.integers(1, 20), blocks=st.integers(1, 20), cut=st.integers(0, 15),
    dtype=st.sampled_from([BF16, F16, F32]), spread=st.integers(0, 12), outlier=st.sampled_from([1.0, 100.0, 1000.0]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_bound(
    m: int, n: int, blocks: int, cut: int, dtype: torch.dtype, spread: int, outlier: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = 16 * blocks
    packed, scales = random_weight(n, k, seed=seed)
    dense = dequantize_nvfp4(packed, scales, torch.rand(n, generator=generator) + 0.01, torch.float64)[:, : k - cut]
    x = torch.randn(m, k, generator=generator) * 2.0 ** -torch.randint(0, spread + 1, (m, k), generator=generator)
    x[:, 0] *= outlier
    x = x[:, : k - cut].to(dtype)
    apart = (rounded_rows(x) - x.double()) @ dense.t()
    assert bool(torch.all(apart.abs() <= most_apart(x.double(), dense) * (1 + 1e-6)))


def test_errors_of_long_sums_are_less() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = quantize_nvfp4(torch.randn(64, 4096, generator=generator) / 64).dequantize(torch.float64)
    x = torch.randn(64, 4096, generator=generator).to(BF16)
    apart, exact = (rounded_rows(x) - x.double()) @ dense.t(), x.double() @ dense.t()
    assert 0.07 < float(torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(exact)) < 0.12
