"""The layout of int8 weights: where each value lies, its inverse, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.ops.int8_layout import pack_int8, unpack_int8
from untorch.runtime.errors import InvalidArgumentError


@given(st.integers(1, 50), st.integers(0, 21), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_pack_and_unpack(n: int, k: int, seed: int) -> None:
    values = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    packed, sums = pack_int8(values)
    assert packed.shape == (-(-n // 16), -(-k // 4), 16, 4)
    assert packed.is_contiguous()
    assert torch.equal(unpack_int8(packed, n, k), values)
    for row in range(packed.shape[0] * 16):
        for column in range(packed.shape[1] * 4):
            expected = values[row, column] if row < n and column < k else 0
            assert packed[row // 16, column // 4, row % 16, column % 4] == expected
    assert sums.dtype == torch.int32
    assert sums.tolist() == values.long().sum(1).tolist() + [0] * (-n % 16)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (torch.ones(2, 3), "pack_int8: values: expected int8 [n, k] with k at most 65536, got torch.float32 (2, 3)"),
        (torch.ones(3, dtype=torch.int8), "got torch.int8 (3,)"),
        (torch.ones(1, 65537, dtype=torch.int8), "got torch.int8 (1, 65537)"),
    ],
)
def test_what_cannot_be_packed(values: torch.Tensor, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        pack_int8(values)
    assert text in str(error.value)


def test_what_cannot_be_unpacked() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"unpack_int8: packed: expected int8 \[n / 16\]\[k / 4\]\[16\]\[4\]"
    ):
        unpack_int8(torch.ones(2, 2, 16, 8, dtype=torch.int8), 32, 16)
