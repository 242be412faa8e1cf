"""untorch::paged_prefill and paged_prefill_decode: their shape, and what they say where their kernels are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from untorch.ops.paged_prefill import decodes, paged_prefill, paged_prefill_decode


def decode(*given: Any) -> torch.Tensor:
    result: torch.Tensor = paged_prefill_decode(*given, 1)
    return result


BOTH = pytest.mark.parametrize(
    ("operator", "name"), [(paged_prefill, "paged_prefill"), (decode, "paged_prefill_decode")]
)


def arguments(device: str = "cpu", tokens: int = 5) -> tuple[Any, ...]:
    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return (
        zeros(tokens, 4, 64, dtype=torch.bfloat16), zeros(3, 4096, dtype=torch.bfloat16),
        zeros(1, 2, dtype=torch.int32), zeros(2, dtype=torch.int32), zeros(1, dtype=torch.int32), None,
        zeros(1, dtype=torch.int64), 16, 2, 0.125, 0, 0, 4,
    )  # fmt: skip


@BOTH
def test_the_shape_of_its_result(operator: Any, name: str) -> None:
    out = operator(*arguments("meta"))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((5, 4, 64), torch.bfloat16, True)
    more = (1,) if operator is decode else ()
    made = paged_prefill_decode if operator is decode else paged_prefill
    torch.library.opcheck(made, arguments(tokens=0) + more, test_utils="test_schema")


@BOTH
def test_no_tokens(operator: Any, name: str) -> None:
    assert operator(*arguments(tokens=0)).shape == (0, 4, 64)


@BOTH
def test_it_is_for_gpus(operator: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{name}: argument 'q' is on cpu, expected cuda$"):
        operator(*arguments())


@BOTH
def test_a_library_without_cuda(operator: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.ops.native.serves", lambda operator, x: False)
    with pytest.raises(RuntimeError, match=f"^{name}: expected an untorch that was built with CUDA$"):
        operator(*arguments())


@pytest.mark.parametrize(
    ("width", "group", "expected"), [(64, 1, True), (128, 8, True), (128, 9, False), (96, 4, False), (256, 1, False)]
)
def test_layers_that_are_decoded(width: int, group: int, expected: bool) -> None:
    assert decodes(width, group) is expected
