"""Paged attention on the CPU against its reference: batches of prefill, chunks and decode over shuffled pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import shim
from tests.native.shim import Opt, ShimError, call
from untorch.ops.kv_pages import Pages, block_elements
from untorch.ops.paged_attention import paged_attention

NAME = "aoti_torch_cpu_paged_attention"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KV = [None, torch.int8, torch.float8_e4m3fn]


def batch(
    lengths: list[tuple[int, int]],
    heads: int,
    heads_kv: int,
    width: int,
    width_v: int,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    offset: int = 0,
    seed: int = 0,
    kv: torch.dtype | None = None,
) -> dict[str, Any]:
    """Arguments for sequences of (queries, positions); the pages hold what came before, in shuffled order.

    kv: the pool's dtype, int8 or float8_e4m3fn; None: that of q.
    """
    g = torch.Generator().manual_seed(seed)
    tokens = sum(queries for queries, _ in lengths) + padding
    needed = [-(-length // block) for _, length in lengths]
    blocks, columns = sum(needed) + 2, max([*needed, 1]) + 1
    free = torch.randperm(blocks, generator=g).tolist()
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    ends = [0]
    for s, (queries, length) in enumerate(lengths):
        pages = [free.pop() for _ in range(needed[s])]
        table[s, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for i in range(queries):
            j = length - queries + i
            slots[ends[-1] + i] = pages[j // block] * block + j % block
        ends.append(ends[-1] + queries)
    if kv is None:
        pool = torch.randn(blocks, offset + heads_kv * block * (width + width_v) + 3, generator=g).to(dtype)
    else:
        offset = offset // 16 * 16
        elements = offset + block_elements(kv, heads_kv, block, width, width_v) + 16
        pool = torch.randint(-99, 99, (blocks, elements), generator=g, dtype=torch.int8).view(kv)
        rows = (torch.randn(blocks, block, heads_kv, size, generator=g) for size in (width, width_v))
        page, place = (i.reshape(-1) for i in torch.meshgrid(torch.arange(blocks), torch.arange(block), indexing="ij"))
        Pages(pool, offset, block, heads_kv, width, width_v).write(page, place, *(x.flatten(0, 1) for x in rows))
    return {
        "q": torch.randn(tokens, heads, width, generator=g).to(dtype),
        "k": torch.randn(tokens, heads_kv, width, generator=g).to(dtype),
        "v": torch.randn(tokens, heads_kv, width_v, generator=g).to(dtype),
        "pool": pool,
        "block_table": table, "cu_seqlens_q": torch.tensor(ends, dtype=torch.int32),
        "seqlens_k": torch.tensor([length for _, length in lengths], dtype=torch.int32), "slot_mapping": slots,
        "sinks": None, "alibi": None, "offset": offset, "block": block, "heads_kv": heads_kv, "width": width,
        "width_v": width_v, "scale": width**-0.5, "window": 0, "chunk": 0, "softcap": 0.0,
    }  # fmt: skip


OPTIONAL = ("k", "v", "sinks", "alibi")


def ours(given: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = call(NAME, *(Opt(v) if k in OPTIONAL else v for k, v in given.items()), returns=1)
    return out


def verify(given: dict[str, Any]) -> None:
    plain, reference = dict(given, pool=given["pool"].clone()), dict(given, pool=given["pool"].clone())
    got, expected = ours(plain), paged_attention(**reference)
    tolerance = TOLERANCE[given["q"].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(plain["pool"].view(torch.uint8), reference["pool"].view(torch.uint8))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 300))
        lengths.append((draw(st.integers(0, min(length, 70))), length))
    heads_kv = draw(st.sampled_from([1, 2, 3]))
    given = batch(
        lengths, heads_kv * draw(st.sampled_from([1, 2, 4, 7])), heads_kv, draw(st.sampled_from([8, 24, 64])),
        draw(st.sampled_from([8, 20, 64])), draw(st.sampled_from([16, 32, 48])),
        draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)), draw(st.sampled_from([0, 5, 64])),
        draw(st.integers(0, 1000)), draw(st.sampled_from(KV)),
    )  # fmt: skip
    heads = given["q"].shape[1]
    given["window"] = draw(st.sampled_from([0, 0, 1, 17, 100]))
    given["chunk"] = draw(st.sampled_from([0, 0, 16, 37]))
    given["softcap"] = draw(st.sampled_from([0.0, 2.5]))
    given["sinks"] = draw(st.sampled_from([None, torch.linspace(-2, 2, heads)]))
    given["alibi"] = draw(st.sampled_from([None, torch.linspace(0.01, 0.5, heads)]))
    if draw(st.booleans()):  # a layer that reads what another one wrote
        given["k"] = given["v"] = None
    verify(given)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("sinks", "kv"), [(False, None), (True, None), (True, torch.int8), (False, KV[2])])
def test_long_sequences_are_cut_into_parts(dtype: torch.dtype, sinks: bool, kv: torch.dtype | None) -> None:
    given = batch([(1, 5000), (1, 1025), (2, 3000), (40, 2100)], 8, 2, 64, 64, 16, dtype, kv=kv)
    given["sinks"] = torch.randn(8) if sinks else None
    verify(given)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("width", "width_v"), [(64, 64), (40, 24), (33, 16), (8, 100)])
@pytest.mark.parametrize("window", [0, 50])
def test_prompts(width: int, width_v: int, window: int, dtype: torch.dtype) -> None:
    """Blocks of 48 rows, whole and not, widths that are no multiple of a tile's."""
    given = batch([(70, 200), (9, 37), (33, 33)], 8, 2, width, width_v, 16, dtype)
    given["window"] = window
    verify(given)


@pytest.mark.parametrize("kv", KV)
def test_pages_behind_the_window_may_be_anything(kv: torch.dtype | None) -> None:
    given = batch([(3, 400)], 2, 1, 16, 16, kv=kv)
    given["window"] = 40
    before = ours(dict(given, pool=given["pool"].clone()))
    given["block_table"][0, :22] = -5
    pool = given["pool"].clone()
    assert torch.equal(ours(dict(given, pool=pool)), before)


@pytest.mark.parametrize("kv", KV)
def test_strided_operands(kv: torch.dtype | None) -> None:
    given = batch([(5, 20), (1, 33)], 4, 2, 16, 16, kv=kv)
    packed = torch.randn(6, 4 * 16 + 2 * 32)
    given["q"] = packed[:, :64].unflatten(1, (4, 16))
    given["k"], given["v"] = (
        packed[:, 64:96].unflatten(1, (2, 16)),
        packed[:, 96:].unflatten(1, (16, 2)).transpose(1, 2),
    )
    verify(given)


@pytest.mark.parametrize("kv", KV)
def test_threads_do_not_change_a_bit(kv: torch.dtype | None) -> None:
    given = batch([(1, 3000), (30, 90), (1, 40)], 8, 2, 64, 64, kv=kv)
    results = []
    for threads in (1, 2, 3, 5):
        shim.lib.utp_set_num_threads(threads)
        results.append(ours(dict(given, pool=given["pool"].clone())))
    shim.lib.utp_set_num_threads(2)
    assert all(torch.equal(result, results[0]) for result in results[1:])


SPECIAL = torch.tensor([0.0, -0.0, 1e-45, 3e-41, 1e-38, 1e-30, 1.0, 448.0, 3e38, torch.inf, -torch.inf, torch.nan])


def special_rows(given: dict[str, Any]) -> None:
    """Keys and values of all magnitudes, at ties between codes, subnormal, infinite and NaN: 52 tokens or more."""
    for name in ("k", "v"):
        rows = torch.randn(given[name].shape, generator=torch.Generator().manual_seed(3))
        rows *= torch.logspace(-9, 4, len(rows))[:, None, None]
        rows[:20] = torch.arange(20)[:, None, None] / 16 + torch.arange(rows.shape[2]) / 2
        rows[:20, :, 0] = 127.0 if given["pool"].dtype == torch.int8 else 448.0
        rows[20 : 20 + len(SPECIAL), 0, 3] = SPECIAL
        rows[40 : 40 + len(SPECIAL)] = SPECIAL[:, None, None]
        given[name] = rows.to(given[name].dtype)


@pytest.mark.parametrize("kv", KV[1:])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_codes_are_those_of_the_reference(kv: torch.dtype, dtype: torch.dtype) -> None:
    given = batch([(90, 90)], 2, 1, 24, 20, dtype=dtype, kv=kv)
    special_rows(given)
    plain, reference = dict(given, pool=given["pool"].clone()), dict(given, pool=given["pool"].clone())
    ours(plain), paged_attention(**reference)
    assert torch.equal(plain["pool"].view(torch.uint8), reference["pool"].view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.ones(3, 2, 8).double()}, "argument 'q' must be float32, bfloat16 or float16, got float64"),
        ({"heads_kv": 3}, "2 heads do not divide into 3 KV heads"),
        ({"block": 20}, "argument 'block' must be a multiple of 16, got 20"),
        ({"offset": 100}, "the pool's blocks have 259 elements, and the layer needs 256 from 100 on"),
        (
            {"pool": torch.ones(2, 512, dtype=torch.uint8)},
            "argument 'pool' must be float32, int8 or float8_e4m3fn [blocks, elements], got uint8 [2, 512]",
        ),
        (
            {"pool": torch.ones(2, 512, dtype=torch.int8), "offset": 8},
            "the offset and the pool's stride must be multiples of 16 in int8, got 8 and 512",
        ),
        (
            {"pool": torch.ones(2, 328).to(torch.float8_e4m3fn)},
            "the offset and the pool's stride must be multiples of 16 in float8_e4m3fn, got 0 and 328",
        ),
        (
            {"pool": torch.ones(4 * 512 + 1, dtype=torch.int8)[1:].view(4, 512)},
            "argument 'pool' must begin at a multiple of 16 bytes",
        ),
        (
            {"pool": torch.ones(2, 304, dtype=torch.int8)},
            "the pool's blocks have 304 elements, and the layer needs 320 from 0 on",
        ),
        ({"v": None}, "'k' and 'v' must be both given or both absent"),
        ({"window": -1}, "'window' and 'chunk' must not be negative, got -1 and 0"),
        ({"seqlens_k": torch.tensor([3])}, "argument 'seqlens_k' must be int32, got int64"),
        (
            {"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)},
            "argument 'cu_seqlens_q' has a wrong value at 1: 4",
        ),
        (
            {"cu_seqlens_q": torch.tensor([1, 3], dtype=torch.int32)},
            "argument 'cu_seqlens_q' has a wrong value at 0: 1",
        ),
        ({"seqlens_k": torch.tensor([2], dtype=torch.int32)}, "argument 'seqlens_k' has a wrong value at 0: 2"),
        ({"seqlens_k": torch.tensor([99], dtype=torch.int32)}, "argument 'seqlens_k' has a wrong value at 0: 99"),
        (
            {"block_table": torch.tensor([[7, 0]], dtype=torch.int32)},
            "argument 'block_table' has a wrong value at 0: 7",
        ),
        (
            {"slot_mapping": torch.tensor([0, 48, 2])},
            "argument 'slot_mapping' has a wrong value at 1: 48",
        ),
        ({"sinks": torch.ones(3)}, "argument 'sinks' must have shape [2], got [3]"),
    ],
)
def test_errors(change: dict[str, Any], text: str) -> None:
    given = batch([(3, 3)], 2, 1, 8, 8)
    given.update(change)
    with pytest.raises(ShimError) as caught:
        ours(given)
    assert str(caught.value) == f"paged_attention: {text}"
