"""untorch::paged_prefill: its shape, and what it says where its kernel is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from untorch.ops.paged_prefill import paged_prefill


def arguments(device: str = "cpu", tokens: int = 5) -> tuple[Any, ...]:
    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return (
        zeros(tokens, 4, 64, dtype=torch.bfloat16), zeros(3, 4096, dtype=torch.bfloat16),
        zeros(1, 2, dtype=torch.int32), zeros(2, dtype=torch.int32), zeros(1, dtype=torch.int32), None,
        zeros(1, dtype=torch.int64), 16, 2, 0.125, 0, 0, 4,
    )  # fmt: skip


def test_the_shape_of_its_result() -> None:
    out = paged_prefill(*arguments("meta"))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((5, 4, 64), torch.bfloat16, True)
    torch.library.opcheck(paged_prefill, arguments(tokens=0), test_utils="test_schema")


def test_no_tokens() -> None:
    assert paged_prefill(*arguments(tokens=0)).shape == (0, 4, 64)


def test_it_is_for_gpus() -> None:
    with pytest.raises(RuntimeError, match="^paged_prefill: argument 'q' is on cpu, expected cuda$"):
        paged_prefill(*arguments())


def test_a_library_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.ops.native.serves", lambda operator, x: False)
    with pytest.raises(RuntimeError, match="^paged_prefill: expected an untorch that was built with CUDA$"):
        paged_prefill(*arguments())
