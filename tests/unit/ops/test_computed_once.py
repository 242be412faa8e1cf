"""Tests of untorch::computed_once: a contiguous copy."""

from __future__ import annotations

import torch

from untorch.ops.computed_once import OPERATOR


def test_a_contiguous_copy() -> None:
    x = torch.randn(3, 5).t()
    y = OPERATOR(x)
    assert torch.equal(x, y) and y.is_contiguous() and y.data_ptr() != x.data_ptr()
    torch.library.opcheck(OPERATOR, (x,))
