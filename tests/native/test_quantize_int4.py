"""int4 weights by the CPU's kernel: bit for bit what torch's operators give, packed."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.native.shim import ShimError, call
from untorch.quant.methods import quantize_int4, quantize_int4_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify(weight: torch.Tensor, group: int, method: str, more: tuple[int, int] = (0, 0)) -> None:
    n, width = -(-weight.shape[0] // 8) * 8 + more[0], max(128, group)
    k = -(-weight.shape[1] // width) * width + more[1] * width
    packed, scales, error = quantize_int4(weight, group, method, n, k)
    expected = quantize_int4_reference(weight, group, method, n, k)
    assert torch.equal(packed, expected[0]) and torch.equal(scales, expected[1])
    assert error == pytest.approx(expected[2], rel=1e-5, abs=1e-6)  # of the order of sums


@pytest.mark.parametrize("method", ["rtn", "hqq"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_as_the_reference(dtype: torch.dtype, group: int, method: str) -> None:
    """Sizes that fill no tile, group or vector; weights whose scale or zero is subnormal, rounded to 0, or far off."""
    generator = torch.Generator().manual_seed(group)
    for n, k in ((8, 128), (13, 130), (1, 1), (40, 1000), (7, 33)):
        normal = torch.randn(n, k, generator=generator)
        for weight in (normal * 0.02, normal * 100 + 50, normal * 1e-6, normal * 1e-42, normal * 1e-3 + 1000,
                       torch.zeros(n, k), torch.full((n, k), 3.0), -torch.zeros(n, k)):  # fmt: skip
            verify(weight.to(dtype), group, method)


@hypothesis.given(
    n=st.integers(1, 40), k=st.integers(1, 700), group=st.sampled_from([32, 64, 128, 256]),
    method=st.sampled_from(["rtn", "hqq"]), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]),
    shift=st.sampled_from([0.0, 1.0, -50.0]), more=st.tuples(st.sampled_from([0, 8, 24]), st.integers(0, 2)),
    apart=st.integers(0, 5), seed=st.integers(0, 2**31),
)  # fmt: skip
@hypothesis.settings(deadline=None, max_examples=100)
def test_drawn(
    n: int, k: int, group: int, method: str, dtype: torch.dtype, scale: float, shift: float, more: tuple[int, int],
    apart: int, seed: int,
) -> None:  # fmt: skip
    weight = (torch.randn(n, k + apart, generator=torch.Generator().manual_seed(seed)) + shift) * scale
    verify(weight.to(dtype)[:, apart:], group, method, more)


def test_columns_apart_and_double_precision() -> None:
    """Not the kernel's, so the reference's."""
    weight = torch.randn(128, 16, generator=torch.Generator().manual_seed(0)).T
    verify(weight, 32, "rtn")
    verify(weight.contiguous().double(), 32, "rtn")


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    weight = torch.randn(800, 512, generator=torch.Generator().manual_seed(1))  # enough for several threads
    packed, scales, _ = quantize_int4(weight, 128, "rtn", 800, 512)
    alone, own, _ = quantize_int4(weight[792:], 128, "rtn", 8, 512)
    assert torch.equal(packed[99:], alone) and torch.equal(scales[:, 792:], own)


def arguments(**changed: Any) -> list[Any]:
    given: dict[str, Any] = {
        "packed": torch.empty(1, 1, 32, 4, dtype=torch.int32), "scale_and_zero": torch.empty(2, 8, 2),
        "sums": torch.empty(5, 2, dtype=torch.float64), "weight": torch.ones(5, 100), "group": 64, "by_range": 1,
    }  # fmt: skip
    return list((given | changed).values())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"weight": torch.ones(5, 100).double()},
         "argument 'weight' must be floating point of two dimensions, the last one dense, got float64 of shape [5, 100]"),
        ({"weight": torch.ones(100, 5).T},
         "argument 'weight' must be floating point of two dimensions, the last one dense, got float32 of shape [5, 100]"),
        ({"group": 16}, "group_size must be a multiple of 32 up to 1024, got 16"),
        ({"group": 2048}, "group_size must be a multiple of 32 up to 1024, got 2048"),
        ({"packed": torch.empty(1, 1, 32, 2, dtype=torch.int32)},
         "argument 'packed' must be contiguous int32 [n / 8, k / 128, 32, 4] with n of 5 or more and k of 100 or more, a "
         "multiple of 64, got int32 of shape [1, 1, 32, 2]"),
        ({"group": 256},
         "argument 'packed' must be contiguous int32 [n / 8, k / 128, 32, 4] with n of 5 or more and k of 100 or more, a "
         "multiple of 256, got int32 of shape [1, 1, 32, 4]"),
        ({"scale_and_zero": torch.empty(2, 5, 2)},
         "argument 'scale_and_zero' must be contiguous float32 [2, 8, 2], got float32 of shape [2, 5, 2]"),
        ({"scale_and_zero": torch.empty(2, 8, 2).half()},
         "argument 'scale_and_zero' must be contiguous float32 [2, 8, 2], got float16 of shape [2, 8, 2]"),
        ({"sums": torch.empty(5, 2)},
         "argument 'sums' must be contiguous float64 [5, 2], got float32 of shape [5, 2]"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("untorch_quantize_int4", *arguments(**changed))
    assert str(error.value) == f"quantize_int4: {text}"
