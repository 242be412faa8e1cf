"""untorch::causal_conv1d as an operator: its schema and fake, and the reference against transformers' own function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.native.state_batches import conv_batch
from untorch.ops.causal_conv1d import OPERATOR, causal_conv1d


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(dtype: torch.dtype, bias: bool) -> None:
    given = conv_batch([(5, 20), (3, 3), (0, 4)], 12, 4, dtype, padding=2)
    if not bias:
        given["bias"] = None
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATOR, tuple(given.values()), test_utils=checks)


@pytest.mark.parametrize("chunks", [(11,), (1,) * 11, (2, 6, 1, 2)])
@pytest.mark.parametrize("silu", [False, True])
def test_the_reference_is_transformers(chunks: tuple[int, ...], silu: bool) -> None:
    """Whole and in pieces, two sequences of a batch, whose slots hold something else."""
    transformers = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = torch.randn(2, 11, 6)
    given = conv_batch([(1, 1), (1, 1)], 6, 4, offset=16)
    found, begin = [], 0
    for count in chunks:
        given["x"] = x[:, begin : begin + count].flatten(0, 1)
        begin += count
        given["cu_seqlens_q"] = torch.tensor([0, count, 2 * count], dtype=torch.int32)
        given["seqlens_k"] = torch.tensor([begin, begin], dtype=torch.int32)
        found.append(causal_conv1d(**{**given, "silu": silu}).unflatten(0, (2, count)))
    expected = transformers.causal_conv1d_fn(
        x.transpose(1, 2), given["weight"], given["bias"], activation="silu" if silu else None
    )
    torch.testing.assert_close(torch.cat(found, 1), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    kept = given["states"][given["state_slots"].long(), 16 : 16 + 18].view(2, 3, 6)
    assert torch.equal(kept, x[:, -3:])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(3, 8).double()}, "x: expected float32, bfloat16 or float16 [tokens, channels], got "
                                            "torch.float64 (3, 8)"),
        ({"weight": torch.zeros(7, 4)}, "weight: expected [8, width], got (7, 4)"),
        ({"weight": torch.zeros(8, 4).half()}, "weight: expected torch.float32, as x has, got torch.float16"),
        ({"bias": torch.zeros(7)}, "bias: expected [8], got (7,)"),
        ({"states": torch.zeros(3, 9)}, "states: expected rows of 24 elements or more, got 9"),
        ({"states": torch.zeros(3, 99).half()}, "states: expected torch.float32 [slots, elements], got torch.float16 "
                                                "(3, 99)"),
        ({"state_slots": torch.tensor([0])}, "state_slots: expected torch.int32 [sequences], got torch.int64 (1,)"),
        ({"state_slots": torch.tensor([3], dtype=torch.int32)}, "state_slots: expected -1 to 2, got 3"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], text: str) -> None:
    given = {**conv_batch([(3, 3)], 8, 4), **change}
    with pytest.raises(ValueError, match="causal_conv1d") as caught:
        causal_conv1d(**given)
    assert str(caught.value) == f"causal_conv1d: {text}"
