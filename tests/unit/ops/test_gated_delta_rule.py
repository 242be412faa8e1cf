"""untorch::gated_delta_rule as an operator: its schema and fake, and the reference against transformers' functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.native.state_batches import channel_decays, delta_batch, without_beta
from untorch.ops.gated_delta_rule import OPERATOR, gated_delta_rule

SEQUENCES, TOKENS = 2, 70  # more than a chunk of transformers' functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["head", "channel", "plain"])
def test_opcheck(dtype: torch.dtype, kind: str) -> None:
    given = delta_batch([(5, 20), (3, 3), (0, 4)], 4, 2, 8, 6, dtype, padding=2)
    given = {"head": lambda x: x, "channel": channel_decays, "plain": without_beta}[kind](given)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATOR, tuple(given.values()), test_utils=checks)


def in_pieces(given: dict[str, Any], chunks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [sequences, tokens, heads, width_v] and the states behind them; the slots held something else before."""
    found, begin = [], 0
    for count in chunks:
        cut = {
            name: None if given[name] is None else given[name].unflatten(0, (SEQUENCES, TOKENS))[:, begin : begin + count]
            .flatten(0, 1)
            for name in ("q", "k", "v", "g", "beta")
        }  # fmt: skip
        begin += count
        ends = torch.tensor([0, count, 2 * count], dtype=torch.int32)
        out = gated_delta_rule(**{**given, **cut, "cu_seqlens_q": ends, "seqlens_k": torch.full_like(ends[1:], begin)})
        found.append(out.unflatten(0, (SEQUENCES, count)))
    heads, width, width_v = given["v"].shape[1], given["q"].shape[2], given["v"].shape[2]
    offset = given["offset"]
    rows = given["states"][given["state_slots"].long(), offset : offset + heads * width * width_v]
    return torch.cat(found, 1), rows.view(SEQUENCES, heads, width, width_v)


@pytest.mark.parametrize("chunks", [(70,), (3, 65, 1, 1)])
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_the_reference_is_transformers(chunks: tuple[int, ...], kind: str) -> None:
    given = delta_batch([(TOKENS, TOKENS)] * SEQUENCES, 4, 2, 8, 6, offset=16)
    name, function = "qwen3_next", "torch_chunk_gated_delta_rule"
    if kind == "channel":
        given = channel_decays(delta_batch([(TOKENS, TOKENS)] * SEQUENCES, 4, 4, 8, 6, offset=16))
        name, function = "kimi_linear", "chunk_kimi_delta_attention"
    transformers = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    found, states = in_pieces(given, chunks)
    q, k, v, g, beta = (given[name].unflatten(0, (SEQUENCES, TOKENS)) for name in ("q", "k", "v", "g", "beta"))
    expected, last = getattr(transformers, function)(
        q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [(70,), (3, 65, 1, 1)])
def test_without_beta_it_is_mamba_2(chunks: tuple[int, ...]) -> None:
    transformers = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    given = without_beta(delta_batch([(TOKENS, TOKENS)] * SEQUENCES, 4, 2, 8, 6, offset=16))
    found, states = in_pieces({**given, "scale": 1.0}, chunks)
    q, k, v, g = (given[name].unflatten(0, (SEQUENCES, TOKENS)) for name in ("q", "k", "v", "g"))
    steps = -g / 2  # with A = -2: what is added is steps · x
    expected, last = transformers.mamba2_chunk_scan(
        v / steps[..., None], steps, torch.full((4,), -2.0), k, q, chunk_size=16, return_final_states=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, last.transpose(2, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"v": torch.zeros(3, 4, 8).double()}, "v: expected float32, bfloat16 or float16 [tokens, heads, width_v], got "
                                               "torch.float64 (3, 4, 8)"),
        ({"k": torch.zeros(3, 2, 7)}, "k: expected torch.float32 [tokens, heads_k, width], the same for q and k, got "
                                      "torch.float32 (3, 2, 7)"),
        ({"q": torch.zeros(3, 3, 8), "k": torch.zeros(3, 3, 8)}, "4 heads do not divide into 3 key heads"),
        ({"g": torch.zeros(3, 4, 7)}, "g: expected torch.float32 [tokens, 4] or [tokens, 4, 8], got torch.float32 "
                                      "(3, 4, 7)"),
        ({"beta": torch.zeros(3, 4).half()}, "beta: expected torch.float32 [tokens, 4], got torch.float16 (3, 4)"),
        ({"offset": 9}, "states: expected rows of 265 elements or more, got 259"),
        ({"state_slots": torch.tensor([-2], dtype=torch.int32)}, "state_slots: expected -1 to 2, got -2"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], text: str) -> None:
    given = {**delta_batch([(3, 3)], 4, 2, 8, 8), **change}
    with pytest.raises(ValueError, match="gated_delta_rule") as caught:
        gated_delta_rule(**given)
    assert str(caught.value) == f"gated_delta_rule: {text}"
