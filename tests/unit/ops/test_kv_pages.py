"""Pages of codes: scales, rounding, special rows, sizes; and what is written and read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.ops.kv_pages import (
    KV_DTYPES,
    LARGEST_CODE,
    Pages,
    block_elements,
    dequantize_rows,
    quantize_rows,
)

KV = list(LARGEST_CODE)


def step(x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of an element: half of the distance of its neighbours among the codes."""
    if dtype == torch.int8:
        return scales.float()[..., None] * 0.5
    # 3 bits of mantissa, and subnormals below 2^-6.
    codes = x.float().abs() / scales.float()[..., None]
    return scales.float()[..., None] * torch.exp2(codes.clamp(min=2.0**-6).log2().floor() - 4)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999), dtype=st.sampled_from(KV), exponent=st.integers(-25, 20), width=st.sampled_from([1, 7, 64])
)  # fmt: skip
def test_the_error_is_half_a_step(seed: int, dtype: torch.dtype, exponent: int, width: int) -> None:
    x = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = quantize_rows(x, dtype)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (dtype, x.shape, torch.bfloat16, x.shape[:2])
    exact = x.abs().amax(-1).double() / LARGEST_CODE[dtype]
    # Rounded up, to 8 bits; a product with the reciprocal is off by an ulp of float32.
    assert (scales.double() >= exact * (1 - 2e-7)).all() and (scales.double() <= exact * (1 + 2**-7)).all()
    error = (dequantize_rows(codes, scales) - x).abs()
    assert (error <= step(x, scales, dtype) * (1 + 1e-5)).all()
    assert codes.float().abs().max() <= LARGEST_CODE[dtype]


@pytest.mark.parametrize("dtype", KV)
def test_special_rows(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0], [1.0, torch.inf], [torch.nan, 1.0], [1e-45, 0.0], [3e38, 1.0]])
    codes, scales = quantize_rows(x, dtype)
    assert scales.isnan().tolist() == [False, True, True, False, False]
    assert scales[0] == 0 and scales[3] == 0
    assert codes.float()[:4].abs().max() == 0
    back = dequantize_rows(codes, scales)
    assert back[0].abs().max() == 0 and back[1:3].isnan().all()
    torch.testing.assert_close(back[4, 0], x[4, 0], rtol=0.01, atol=0)


def test_ties_go_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.5]])
    codes, scales = quantize_rows(x, torch.int8)
    assert scales.tolist() == [1.0] and codes.tolist() == [[127, 0, 2, -2, 0]]
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10]])
    codes, scales = quantize_rows(x, torch.float8_e4m3fn)
    assert scales.tolist() == [1.0] and codes.float().tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2**-8]]


def test_sizes() -> None:
    assert list(KV_DTYPES) == ["int8", "fp8"] and list(KV_DTYPES.values()) == KV
    assert block_elements(torch.bfloat16, 8, 16, 128, 64) == 8 * 16 * (128 + 64)
    for dtype in KV:
        assert block_elements(dtype, 8, 16, 128, 64) == 8 * 16 * (128 + 64 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *KV])
def test_a_layer_writes_its_part_alone(dtype: torch.dtype) -> None:
    elements, offset = block_elements(dtype, 2, 16, 8, 4), 32
    pool = torch.full((3, offset + elements + 16), 9, dtype=torch.int8).to(dtype)
    before = pool.clone()
    pages = Pages(pool, offset, 16, 2, 8, 4)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 4)
    pages.write(torch.tensor([2, 1]), torch.tensor([15, 0]), *(x if dtype in KV else x.to(dtype) for x in (k, v)))
    keys, values = pages.read(torch.tensor([1, 2]))
    assert keys.shape == (2, 32, 8) and values.shape == (2, 32, 4)
    tolerance = 0.08 if dtype in KV else 1e-3
    torch.testing.assert_close(keys[:, 31], k[0], rtol=tolerance, atol=0.02)
    torch.testing.assert_close(values[:, 0], v[1], rtol=tolerance, atol=0.02)
    raw, old = pool.view(torch.uint8), before.view(torch.uint8)
    size = dtype.itemsize
    assert torch.equal(raw[:, : offset * size], old[:, : offset * size])
    assert torch.equal(raw[:, (offset + elements) * size :], old[:, (offset + elements) * size :])
    assert torch.equal(raw[0], old[0])
    # A token and head has width + width_v elements, and two scales.
    written = 2 * 2 * (8 + 4) * size + (2 * 2 * 4 if dtype in KV else 0)
    assert int((raw != old).sum()) <= written
