"""Prompts over pages by the WGMMA kernel, through the operator that calls it, against the reference."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.native.test_paged_attention import batch
from untorch.ops.paged_attention import paged_attention
from untorch.ops.paged_prefill import is_served, paged_prefill

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.filterwarnings("ignore"),
]
BF16 = torch.bfloat16
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def prompts(
    lengths: list[tuple[int, int]],
    heads: int,
    heads_kv: int,
    width: int,
    block: int = 16,
    dtype: torch.dtype = BF16,
    padding: int = 0,
    layer: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """As ``batch``, of pages that the kernel takes: rows of ``width`` elements. What no position uses is NaN."""
    given = batch(lengths, heads, heads_kv, width, width, block, dtype, padding, 0, seed)
    rows = heads_kv * block * 2
    pool = torch.full((given["pool"].shape[0], (layer + 1) * rows + 3, width), torch.nan, dtype=dtype)
    layers = pool[:, layer * rows : (layer + 1) * rows].unflatten(1, (2, heads_kv, block))
    for s, (_, length) in enumerate(lengths):
        for j in range(0, length, block):
            page, places = int(given["block_table"][s, j // block]), min(block, length - j)
            generator = torch.Generator().manual_seed(seed + page)
            values = torch.randn((2, heads_kv, places, width), generator=generator)
            layers[page, :, :, :places] = values.to(dtype)
    return given | {"pool": pool.flatten(1), "offset": layer * rows * width}


def placed(given: dict[str, Any]) -> dict[str, Any]:
    offset = given["offset"]
    assert is_served(
        90, given["q"].dtype, given["pool"], offset, given["width"], given["width_v"], given["scale"], window=0, alibi=False,
        softcap=0.0,
    )  # fmt: skip
    on_gpu = given | {"offset": torch.tensor([offset]), "aligned": offset % 16 == 0, "wgmma": True}
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in on_gpu.items()}


def reference(given: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = paged_attention(**dict(given, pool=given["pool"].clone()))
    return out.cuda()


def verify(given: dict[str, Any]) -> None:
    from untorch.ops.attention.paged_operator import paged_attention_triton

    expected = reference(given)
    got = paged_attention_triton(**placed(given))
    tolerance = TOLERANCE[given["q"].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    lengths = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 600))
        lengths.append((min(draw(st.sampled_from([0, 1, 2, 17, 130, 200, length])), length), length))
    heads_kv = draw(st.sampled_from([1, 2, 8]))
    given = prompts(
        lengths, heads_kv * draw(st.sampled_from([1, 2, 4, 5, 7, 16])), heads_kv,
        draw(st.sampled_from([8, 64, 72, 96, 128, 136, 256])), draw(st.sampled_from([16, 32, 48, 64, 128])),
        draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)), draw(st.integers(0, 2)),
        draw(st.integers(0, 1000)),
    )  # fmt: skip
    given["window"] = draw(st.sampled_from([0, 0, 1, 17, 300]))
    given["chunk"] = draw(st.sampled_from([0, 0, 16, 37, 256]))
    given["sinks"] = draw(st.sampled_from([None, torch.linspace(-2, 2, given["q"].shape[1])]))
    if draw(st.booleans()):
        given["k"] = given["v"] = None
    verify(given)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_long_prompts(width: int, dtype: torch.dtype) -> None:
    verify(prompts([(1100, 1100), (300, 2000), (1, 700), (130, 130)], 8, 2, width, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 6, 12, 64, 71, 128])
def test_heads_that_share_keys(group: int) -> None:
    """Groups that do not divide a row block, and those that are larger than one has heads."""
    verify(prompts([(40, 200), (129, 129)], group, 1, 64))


def test_many_sequences() -> None:
    verify(prompts([(20 + i % 50, 60 + i % 70) for i in range(200)], 8, 2, 128))


def test_pages_that_were_given_back() -> None:
    """Those before a window may be anybody's."""
    given = prompts([(100, 1000), (300, 900)], 4, 2, 128) | {"window": 64}
    expected = reference(given)
    table = given["block_table"]
    table[0, : (900 - 64) // 16] = -1
    table[1, : (600 - 64) // 16] = 1 << 30
    from untorch.ops.attention.paged_operator import paged_attention_triton

    got = paged_attention_triton(**placed(given))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_a_cuda_graph_serves_other_lengths() -> None:
    from untorch.ops.attention.paged_operator import paged_attention_triton

    first, second = (
        prompts(lengths, 8, 2, 128, seed=1) for lengths in ([(150, 150), (50, 350)], [(90, 350), (110, 150)])
    )
    expected = reference(second)
    buffers, other = placed(first), placed(second)
    paged_attention_triton(**buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton(**buffers)
    for name, value in other.items():
        if isinstance(value, torch.Tensor):
            buffers[name].copy_(value)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_which_rows_it_writes() -> None:
    """Those of sequences of more than so many tokens. The memory of a result was a tensor of sevens before."""
    given = placed(prompts([(3, 90), (60, 60)], 4, 2, 64))
    names = ("q", "pool", "block_table", "cu_seqlens_q", "seqlens_k", "sinks", "offset", "block", "heads_kv", "scale")

    def run(few: int) -> torch.Tensor:
        sevens = torch.full_like(given["q"], 7.0)
        del sevens
        return paged_prefill(*(given[name] for name in names), 0, 0, few)

    written = [(run(few) != 7).any(-1).any(-1) for few in (0, 3, 60)]
    assert written[0].all()
    assert not written[1][:3].any() and written[1][3:].all()
    assert not written[2].any()


def test_it_is_the_kernel() -> None:
    """And Triton's prefill kernel is not."""
    from untorch.ops.attention.paged_operator import paged_attention_triton

    given = placed(prompts([(60, 60)], 4, 2, 64))
    paged_attention_triton(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        paged_attention_triton(**given)
        torch.cuda.synchronize()
    ran = " ".join(event.name for event in profile.events())
    assert "paged_prefill_wgmma" in ran and "paged_decode" in ran
