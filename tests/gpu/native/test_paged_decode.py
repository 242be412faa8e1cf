"""Sequences of few tokens over pages by the decode kernel of sm_90, by itself and where paged attention calls it."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.gpu.native.test_paged_prefill import TOLERANCE, placed, prompts, reference
from untorch.ops.paged_attention import paged_attention
from untorch.ops.paged_prefill import paged_prefill_decode

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.filterwarnings("ignore"),
]


NAMES = ("q", "pool", "block_table", "cu_seqlens_q", "seqlens_k", "sinks", "offset", "block", "heads_kv", "scale",
         "window", "chunk")  # fmt: skip


def verify(given: dict[str, Any], few: int = 4) -> None:
    """Whatever the number of sequences and of positions, where paged attention has other kernels."""
    given = given | {"pool": given["pool"].clone()}
    expected = paged_attention(**given)  # writes new keys and values
    on_gpu = placed(given)
    got = paged_prefill_decode(*(on_gpu[name] for name in NAMES), few, 1)
    tolerance = TOLERANCE[given["q"].dtype]
    torch.testing.assert_close(got, expected.cuda(), rtol=tolerance, atol=tolerance)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    """One token a sequence, also none and some, with and without a prompt beside them and rows behind them."""
    draw = data.draw
    most = draw(st.sampled_from([1, 1, 1, 4, 20]))
    lengths = []
    for _ in range(draw(st.integers(1, 9))):
        length = draw(st.one_of(st.integers(1, 40), st.integers(1, 3000)))
        lengths.append((min(draw(st.integers(0, most)), length), length))
    if draw(st.booleans()):
        lengths[draw(st.integers(0, len(lengths) - 1))] = (70, 300)
    heads_kv = draw(st.sampled_from([1, 2, 8]))
    given = prompts(
        lengths, heads_kv * draw(st.integers(1, 8)), heads_kv, draw(st.sampled_from([64, 128])),
        draw(st.sampled_from([16, 32, 48, 64, 128])), draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)),
        draw(st.integers(0, 2)), draw(st.integers(0, 1000)),
    )  # fmt: skip
    given["window"] = draw(st.sampled_from([0, 0, 1, 130, 300]))
    given["chunk"] = draw(st.sampled_from([0, 0, 16, 37, 256]))
    given["sinks"] = draw(st.sampled_from([None, torch.linspace(-2, 2, given["q"].shape[1])]))
    if draw(st.booleans()):
        given["k"] = given["v"] = None
    verify(given, draw(st.sampled_from([1, 2, 4, 16])))


@pytest.mark.parametrize("sequences", [1, 2, 5, 16, 33, 200])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_long_sequences(sequences: int, group: int) -> None:
    """All sizes of clusters."""
    lengths = [(1, 4000 + 531 * i if sequences < 16 else 300 + 7 * i) for i in range(sequences)]
    verify(prompts(lengths, 2 * group, 2, 128))


def test_empty_sequences_before_a_prompt() -> None:
    """No more tokens than sequences: all of them are decoded, also those of one sequence."""
    verify(prompts([(0, 50), (6, 90), (0, 10), (0, 7), (0, 5), (0, 900)], 8, 2, 64))


def test_large_and_small_scores() -> None:
    """Softmax over keys whose scores differ by thousands."""
    given = prompts([(1, 700), (1, 70)], 8, 2, 128)
    given["q"] = given["q"] * 300
    verify(given)


def test_pages_that_were_given_back() -> None:
    from untorch.ops.attention.paged_operator import paged_attention_triton

    given = prompts([(1, 1000), (3, 900)], 4, 2, 128) | {"window": 64}
    expected = reference(given)
    table = given["block_table"]
    table[0, : (1000 - 64) // 16] = -1
    table[1, : (900 - 66) // 16] = 1 << 30
    got = paged_attention_triton(**placed(given))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_a_cuda_graph_serves_other_lengths() -> None:
    from untorch.ops.attention.paged_operator import paged_attention_triton

    first, second = (prompts(lengths, 8, 2, 128, seed=1) for lengths in ([(1, 40), (1, 2350)], [(1, 1300), (1, 1100)]))
    expected = reference(second)
    columns = max(given["block_table"].shape[1] for given in (first, second))
    blocks = max(given["pool"].shape[0] for given in (first, second))

    def wide(given: dict[str, Any]) -> dict[str, Any]:
        table = torch.full((2, columns), -1, dtype=torch.int32)
        table[:, : given["block_table"].shape[1]] = given["block_table"]
        pool = torch.zeros(blocks, given["pool"].shape[1], dtype=given["pool"].dtype)
        pool[: given["pool"].shape[0]] = given["pool"]
        return placed(given | {"block_table": table, "pool": pool})

    buffers, other = wide(first), wide(second)
    paged_attention_triton(**buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton(**buffers)
    for name, value in other.items():
        if isinstance(value, torch.Tensor):
            buffers[name].copy_(value)
    for _ in range(50):
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_it_is_the_kernel() -> None:
    """And Triton's are not."""
    from untorch.ops.attention.paged_operator import paged_attention_triton

    given = placed(prompts([(1, 60), (1, 30)], 4, 2, 64))
    paged_attention_triton(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        paged_attention_triton(**given)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events()]
    assert sum("paged_decode_kernel" in name for name in ran) == 1
    assert not any(name in ("paged_decode", "paged_combine") or "wgmma" in name for name in ran)
