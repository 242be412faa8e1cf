"""NVFP4 weights by the CPU's kernel against torch's operators."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.native.shim import ShimError, call
from untorch.quant.nvfp4 import (
    NVFP4Weight,
    nvfp4_error,
    quantize_nvfp4,
    quantize_nvfp4_errors,
    quantize_rows_reference,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify(weight: torch.Tensor, search: bool) -> None:
    made, error, nearest = quantize_nvfp4_errors(weight, search)
    packed, scales = quantize_rows_reference(weight, made.global_scale.expand(weight.shape[0]), search)
    if search:
        # The order of a sum of squares may decide between two scales that are as good.
        reference = nvfp4_error(weight, NVFP4Weight(packed, scales, made.global_scale))
        assert error == pytest.approx(reference, rel=1e-5, abs=1e-12)
        assert nearest is not None and error <= nearest
        assert nearest == pytest.approx(nvfp4_error(weight, quantize_nvfp4(weight, search=False)), rel=1e-9, abs=1e-12)
        same = (made.block_scale.view(torch.uint8) == scales.view(torch.uint8)).repeat_interleave(8, 1)
        assert (made.packed == packed)[same].all() and int((~same).sum()) <= 8 * max(1, scales.numel() // 1000)
    else:
        assert torch.equal(made.packed, packed) and nearest is None
        assert torch.equal(made.block_scale.view(torch.uint8), scales.view(torch.uint8))
    assert error == pytest.approx(nvfp4_error(weight, made), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_reference(dtype: torch.dtype, search: bool) -> None:
    torch.manual_seed(0)
    for n, k in ((8, 128), (13, 130), (1, 1), (40, 1000), (7, 33)):
        normal = torch.randn(n, k)
        tails = torch.distributions.StudentT(2.0).sample((n, k)).clamp(-6e4, 6e4)  # type: ignore[no-untyped-call]
        sparse = normal * (torch.rand(n, k) > 0.98)  # whole blocks of zeros
        for weight in (normal * 0.02, normal * 100 + 50, normal * 1e-6, normal * 1e-42, torch.zeros(n, k),
                       torch.full((n, k), 3.0), tails, sparse, -torch.zeros(n, k)):  # fmt: skip
            verify(weight.to(dtype), search)


@hypothesis.given(
    n=st.integers(1, 20), k=st.integers(1, 200), dtype=st.sampled_from(DTYPES), search=st.booleans(),
    scale=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]), spread=st.sampled_from([0.0, 1.0, 3.0]), apart=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@hypothesis.settings(deadline=None, max_examples=100)
def test_drawn(
    n: int, k: int, dtype: torch.dtype, search: bool, scale: float, spread: float, apart: int, seed: int
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k + apart, generator=generator)
    weight = (weight * torch.exp(spread * torch.randn(n, 1, generator=generator)) * scale).clamp(-6e4, 6e4)
    verify(weight.to(dtype)[:, apart:], search)


def test_every_scale_of_a_block() -> None:
    """With a global scale of 1 the block scales are a sixth of the largest values, rounded to E4M3."""
    largest = torch.cat([torch.arange(1, 4000) * 2.0**-12 * 6, torch.linspace(1, 2700, 3000)])
    weight = largest[:, None].repeat(1, 16)
    weight[:, 1:] = 0
    made = quantize_nvfp4(weight, search=False, global_scale=1.0)
    expected = (largest / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    assert torch.equal(made.block_scale[:, 0].view(torch.uint8), expected.view(torch.uint8))


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    weight = torch.randn(400, 512, generator=torch.Generator().manual_seed(1))  # enough for several threads
    made = quantize_nvfp4(weight, global_scale=0.01)
    alone = quantize_nvfp4(weight[399:], global_scale=0.01)
    assert torch.equal(made.packed[399:], alone.packed)
    assert torch.equal(made.block_scale[399:].view(torch.uint8), alone.block_scale.view(torch.uint8))


def arguments(**changed: Any) -> list[Any]:
    given: dict[str, Any] = {
        "packed": torch.empty(5, 56, dtype=torch.uint8), "block_scale": torch.empty(5, 7, dtype=torch.uint8),
        "sums": torch.empty(5, 3, dtype=torch.float64), "weight": torch.ones(5, 100), "global_scale": torch.ones(5),
        "search": 1,
    }  # fmt: skip
    return list((given | changed).values())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"weight": torch.ones(5, 100).double()},
         "argument 'weight' must be floating point of two dimensions, the last one dense, got float64 of shape [5, 100]"),
        ({"weight": torch.ones(100, 5).T},
         "argument 'weight' must be floating point of two dimensions, the last one dense, got float32 of shape [5, 100]"),
        ({"global_scale": torch.ones(4)},
         "argument 'global_scale' must be contiguous float32 [5], got float32 of shape [4]"),
        ({"packed": torch.empty(5, 50, dtype=torch.uint8)},
         "argument 'packed' must be contiguous uint8 [5, 56], got uint8 of shape [5, 50]"),
        ({"block_scale": torch.empty(5, 6, dtype=torch.uint8)},
         "argument 'block_scale' must be contiguous uint8 [5, 7], got uint8 of shape [5, 6]"),
        ({"sums": torch.empty(5, 3)}, "argument 'sums' must be contiguous float64 [5, 3], got float32 of shape [5, 3]"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("untorch_quantize_nvfp4", *arguments(**changed))
    assert str(error.value) == f"quantize_nvfp4: {text}"
