"""int8 weights by the CPU's kernel: bit for bit what torch's operators give."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.native.shim import ShimError, call
from untorch.quant.int8 import int8_error, quantize_int8, quantize_int8_error, quantize_int8_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify(weight: torch.Tensor) -> None:
    values, scales, error = quantize_int8_error(weight)
    expected = quantize_int8_reference(weight)
    assert torch.equal(values, expected[0]) and torch.equal(scales, expected[1])
    assert error == pytest.approx(int8_error(weight, *expected), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_reference(dtype: torch.dtype) -> None:
    """Sizes that fill no vector; rows whose scale is subnormal, or 0."""
    generator = torch.Generator().manual_seed(0)
    for n, k in ((8, 128), (13, 130), (1, 1), (40, 3000), (7, 33)):
        normal = torch.randn(n, k, generator=generator)
        for weight in (normal * 0.02, normal * 100 + 50, normal * 1e-6, normal * 1e-42, torch.zeros(n, k),
                       torch.full((n, k), -3.0), -torch.zeros(n, k)):  # fmt: skip
            verify(weight.to(dtype))


@hypothesis.given(
    n=st.integers(1, 20), k=st.integers(1, 2500), dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]), shift=st.sampled_from([0.0, 1.0, -50.0]), apart=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@hypothesis.settings(deadline=None, max_examples=80)
def test_drawn(n: int, k: int, dtype: torch.dtype, scale: float, shift: float, apart: int, seed: int) -> None:
    weight = (torch.randn(n, k + apart, generator=torch.Generator().manual_seed(seed)) + shift) * scale
    verify(weight.to(dtype)[:, apart:])


def test_columns_apart_and_double_precision() -> None:
    """Not the kernel's, so the reference's."""
    weight = torch.randn(128, 16, generator=torch.Generator().manual_seed(0)).T
    verify(weight)
    verify(weight.contiguous().double())


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    weight = torch.randn(400, 512, generator=torch.Generator().manual_seed(1))  # enough for several threads
    values, scales = quantize_int8(weight)
    alone, own = quantize_int8(weight[399:])
    assert torch.equal(values[399:], alone) and torch.equal(scales[399:], own)


def arguments(**changed: Any) -> list[Any]:
    given: dict[str, Any] = {
        "values": torch.empty(5, 100, dtype=torch.int8), "scales": torch.empty(5),
        "sums": torch.empty(5, 2, dtype=torch.float64), "weight": torch.ones(5, 100),
    }  # fmt: skip
    return list((given | changed).values())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"weight": torch.ones(5, 100).double()},
         "argument 'weight' must be floating point of two dimensions, the last one dense, got float64 of shape [5, 100]"),
        ({"weight": torch.ones(100, 5).T},
         "argument 'weight' must be floating point of two dimensions, the last one dense, got float32 of shape [5, 100]"),
        ({"values": torch.empty(5, 99, dtype=torch.int8)},
         "argument 'values' must be contiguous int8 [5, 100], got int8 of shape [5, 99]"),
        ({"scales": torch.empty(4)}, "argument 'scales' must be contiguous float32 [5], got float32 of shape [4]"),
        ({"sums": torch.empty(5, 2)}, "argument 'sums' must be contiguous float64 [5, 2], got float32 of shape [5, 2]"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("untorch_quantize_int8", *arguments(**changed))
    assert str(error.value) == f"quantize_int8: {text}"
