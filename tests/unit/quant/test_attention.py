"""``ProjectedAttention``: the results of nn.MultiheadAttention, with every option, from the same memory."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from untorch.quant.attention import PROJECTIONS, ProjectedAttention


def attention(seed: int, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(seed)
    made = nn.MultiheadAttention(32, 4, **options).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


def masks(kind: str, batch: int, length: int, keys: int, is_batched: bool) -> dict[str, torch.Tensor]:
    found = {}
    if kind in ("float", "both"):
        found["attn_mask"] = torch.randn(length, keys)
    if kind == "heads":
        found["attn_mask"] = torch.randn(batch * 4, length, keys)
    if kind == "bool":
        found["attn_mask"] = torch.rand(length, keys) > 0.7
        found["attn_mask"][:, 0] = False
    if kind in ("padding", "both"):
        padding = torch.rand(batch, keys) > 0.6
        padding[:, 0] = False
        padding = padding if is_batched else padding[0]
        as_float = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
        found["key_padding_mask"] = as_float if kind == "both" else padding
    return found


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
    st.integers(0, 99), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["self", "memory", "apart", "other widths"]), st.booleans(), st.booleans(),
    st.sampled_from(["none", "float", "heads", "bool", "padding", "both"]),
)  # fmt: skip
def test_all_options(
    seed: int, batch_first: bool, bias: bool, bias_kv: bool, zero: bool, is_batched: bool, inputs: str,
    need_weights: bool, average: bool, mask: str,
) -> None:  # fmt: skip
    width = 24 if inputs == "other widths" else None
    given = attention(
        seed, bias=bias, batch_first=batch_first, add_bias_kv=bias_kv, add_zero_attn=zero, kdim=width, vdim=width
    )  # fmt: skip
    batch, length, keys = (3 if is_batched else 1), 5, 5 if inputs == "self" else 7

    def tensor(count: int, width: int) -> torch.Tensor:
        shape = (count, width) if not is_batched else (batch, count, width) if batch_first else (count, batch, width)
        return torch.randn(shape)

    query = tensor(length, 32)
    key = query if inputs == "self" else tensor(keys, width or 32)
    value = tensor(keys, width or 32) if inputs in ("apart", "other widths") else key
    options = {"need_weights": need_weights, "average_attn_weights": average}
    options |= masks(mask, batch, length, keys, is_batched)
    with torch.no_grad():
        expected = given(query, key, value, **options)
        out, weights = ProjectedAttention.of(given)(query, key, value, **options)
    torch.testing.assert_close(out, expected[0])
    if need_weights:
        torch.testing.assert_close(weights, expected[1])
    else:
        assert weights is expected[1] is None


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_causal(need_weights: bool, padded: bool) -> None:
    given = attention(0, batch_first=True)
    x, mask = torch.randn(2, 6, 32), nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    options: dict[str, Any] = {
        "attn_mask": mask, "is_causal": True, "need_weights": need_weights,
        "key_padding_mask": torch.zeros(2, 6).masked_fill(padding, float("-inf")) if padded else None,
    }  # fmt: skip
    made = ProjectedAttention.of(given)
    torch.testing.assert_close(made(x, x, x, **options)[0], given(x, x, x, **options)[0])
    with pytest.raises(RuntimeError, match="is_causal needs attn_mask as well"):
        made(x, x, x, is_causal=True)


def test_parameters_are_not_copied() -> None:
    given = attention(0)
    made = ProjectedAttention.of(given)
    memory = {tensor.untyped_storage()._cdata for tensor in given.parameters()}
    assert {tensor.untyped_storage()._cdata for tensor in made.parameters()} == memory
    assert [name for name, _ in made.named_children()] == list(PROJECTIONS)
    assert all(type(part) is nn.Linear for part in made.children())
    assert made.in_proj_weight is None
    assert given.in_proj_weight is not None and given._qkv_same_embed_dim


def test_dropout_in_training() -> None:
    given = attention(0, dropout=0.5, batch_first=True).train()
    made = ProjectedAttention.of(given)
    x = torch.randn(2, 6, 32)
    for need_weights in (False, True):
        first, second = (made(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(first, second)
    made.eval()
    torch.testing.assert_close(made(x, x, x)[0], given.eval()(x, x, x)[0])
