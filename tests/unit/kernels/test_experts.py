"""The grouped GEMM of transformers' experts against its own implementation."""

import numpy
import pytest
import torch
from oracle import TOLERANCES, to_numpy, to_torch

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

NAME = "transformers::grouped_mm_fallback"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("offs", [torch.int32, torch.int64])
def test_grouped_mm_fallback(dtype: torch.dtype, transposed: bool, offs: torch.dtype) -> None:
    pytest.importorskip("transformers.integrations.moe")  # registers the operator
    x = torch.randn(11, 8).to(dtype)
    weight = torch.randn(4, 5, 8).to(dtype).mT if transposed else torch.randn(4, 8, 5).to(dtype)
    ends = torch.tensor([2, 2, 7, 9], dtype=offs)
    expected = torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
    got = find_kernel(NAME)(to_numpy(x), to_numpy(weight), to_numpy(ends))
    assert got.flags.c_contiguous and got.dtype == to_numpy(x).dtype
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(to_torch(got), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("ends", "text"), [([3, 2], "got 2 at 1"), ([3, 5], "got 5 at 1"), ([-1, 4], "got -1 at 0")])
def test_wrong_offsets(ends: list[int], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        find_kernel(NAME)(numpy.ones((4, 2)), numpy.ones((2, 2, 3)), numpy.array(ends))
    assert str(caught.value) == f"{NAME}: argument `offs`: must not decrease and stay within 4, {text}"


def test_wrong_shapes() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        find_kernel(NAME)(numpy.ones((4, 2)), numpy.ones((2, 3, 3)), numpy.ones(2, numpy.int32))
    assert str(caught.value) == (
        f"{NAME}: expected input (tokens, K), weight (experts, K, N) and offs (experts), got the shapes (4, 2), "
        "(2, 3, 3) and (2,)"
    )
