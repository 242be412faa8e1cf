"""``untorch::moe_grouped_mm``: the reference, torch's own checks of an operator, its contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from untorch.ops.moe_grouped_mm import OPERATOR


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 8, generator=generator).to(dtype), torch.randn(3, 5, 8, generator=generator).to(dtype)
    return x, w.mT, torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference(dtype: torch.dtype) -> None:
    x, w, ends = operands(dtype)
    expected = torch.cat([x[:2] @ w[0], x[2:5] @ w[2], x.new_zeros(1, 5)])
    got = OPERATOR(x, w, ends)
    assert torch.equal(got, expected) and got.is_contiguous()


def test_torchs_own_checks() -> None:
    torch.library.opcheck(OPERATOR, operands(), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda x, w, e: (x.double(), w.double(), e),
            "moe_grouped_mm: input: expected bfloat16, float16 or float32 [tokens, K], got float64 [6, 8]",
        ),
        (
            lambda x, w, e: (x[None], w, e),
            "moe_grouped_mm: input: expected bfloat16, float16 or float32 [tokens, K], got float32 [1, 6, 8]",
        ),
        (
            lambda x, w, e: (x, w[:, :7], e),
            "moe_grouped_mm: weight: expected float32 [experts, 8, N] as input has, got float32 [3, 7, 5], not "
            "contiguous",
        ),
        (
            lambda x, w, e: (x, w.half().contiguous(), e),
            "moe_grouped_mm: weight: expected float32 [experts, 8, N] as input has, got float16 [3, 8, 5]",
        ),
        (lambda x, w, e: (x, w, e.long()), "moe_grouped_mm: offs: expected int32 [3], got int64 [3]"),
        (lambda x, w, e: (x, w, e[:2]), "moe_grouped_mm: offs: expected int32 [3], got int32 [2]"),
        (
            lambda x, w, e: (x, w, torch.tensor([3, 2, 5]).int()),
            "moe_grouped_mm: offs: must not decrease and stay within 6, got 2 at 1",
        ),
        (
            lambda x, w, e: (x, w, torch.tensor([3, 4, 7]).int()),
            "moe_grouped_mm: offs: must not decrease and stay within 6, got 7 at 2",
        ),
        (
            lambda x, w, e: (x, w.to("meta"), e),
            "moe_grouped_mm: weight: expected the device of input, cpu, got meta",
        ),
    ],
)
def test_errors(change: Callable[..., tuple[torch.Tensor, ...]], text: str) -> None:
    with pytest.raises(ValueError, match="^moe_grouped_mm: ") as caught:
        OPERATOR(*change(*operands()))
    assert str(caught.value) == text
