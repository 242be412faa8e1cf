"""``untorch::paged_attention``: attention over a paged KV cache, for sequences of any lengths in one batch.

Tokens lie one behind the other: those of sequence s are cu_seqlens_q[s] to cu_seqlens_q[s + 1], and the last of its
seqlens_k[s] positions. Position j lies in block ``block_table[s, j // block]``. ``pool`` [blocks, elements] is one
tensor for several layers: a block has, from ``offset`` on, the layer's K [heads_kv, block, width] and V [heads_kv,
block, width_v]. k and v go to the places that slot_mapping names (block · size + place; -1: nowhere) before anything is
read; without them the pool is only read. A pool of q's dtype holds them as they are. A pool of int8 or float8_e4m3fn
holds codes, and behind V the scales of K and V: see kv_pages.

Query i sees the keys j <= i, with window > 0 those of i - window < j, with chunk > 0 those of its chunk. A score is
softcap · tanh(scale · q · k / softcap) + alibi · (j - i). ``sinks`` are logits that take their share of the softmax.
Tokens behind the last sequence give zeros. The implementation here is the reference; libuntorch.so has the fast one.
"""

from __future__ import annotations

from typing import Any

import torch

from untorch.ops.kv_pages import ALIGNMENT, LARGEST_CODE, Pages, block_elements

__all__ = ["BLOCK_UNIT", "C_SHIM", "OPERATOR", "check_arguments", "paged_attention"]

BLOCK_UNIT = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_paged_attention(AtenTensorHandle q, AtenTensorHandle* k, AtenTensorHandle* v, "
    "AtenTensorHandle pool, AtenTensorHandle block_table, AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k, "
    "AtenTensorHandle slot_mapping, AtenTensorHandle* sinks, AtenTensorHandle* alibi, int64_t offset, int64_t block, "
    "int64_t heads_kv, int64_t width, int64_t width_v, double scale, int64_t window, int64_t chunk, double softcap, "
    "AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::paged_attention", mutates_args=("pool",))
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    slot_mapping: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
    offset: int,
    block: int,
    heads_kv: int,
    width: int,
    width_v: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> torch.Tensor:
    """[tokens, heads, width_v]. Raises ValueError."""
    check_arguments(q, k, v, pool, block_table, offset, block, heads_kv, width, width_v)
    blocks, heads = pool.shape[0], q.shape[1]
    held = Pages(pool, offset, block, heads_kv, width, width_v)
    if k is not None and v is not None:
        kept = slot_mapping >= 0
        places = slot_mapping[kept]
        if bool((places >= blocks * block).any()):
            raise ValueError(f"paged_attention: slot_mapping: expected less than {blocks * block}")
        held.write(places // block, places % block, k[kept], v[kept])
    out = q.new_zeros((q.shape[0], heads, width_v))
    ends, lengths = cu_seqlens_q.tolist(), seqlens_k.tolist()
    for s, (begin, end, length) in enumerate(zip(ends[:-1], ends[1:], lengths, strict=True)):
        if begin == end:
            continue
        pages = block_table[s, : -(-length // block)].long()
        own_keys, own_values = (x[:, :length].repeat_interleave(heads // heads_kv, 0) for x in held.read(pages))
        scores = torch.einsum("qhd,hkd->hqk", q[begin:end].float(), own_keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)[None]
        if alibi is not None:
            scores = scores + alibi[:, None, None] * (j - i)
        seen = j <= i
        if window:
            seen = seen & (i - window < j)
        if chunk:
            seen = seen & (i // chunk == j // chunk)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            extra = sinks[:, None, None].expand(-1, end - begin, 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        # What a page of freed blocks holds is not seen, and may be anything.
        visible = torch.where(seen.any(0)[None, :, None], own_values, 0.0)
        out[begin:end] = torch.einsum("hqk,hkd->qhd", weights, visible).to(q.dtype)
    return out


@paged_attention.register_fake
def _paged_attention_fake(q: torch.Tensor, *others: Any) -> torch.Tensor:
    (k, v, pool, block_table), (offset, block, heads_kv, width, width_v) = others[:4], others[9:14]
    check_arguments(q, k, v, pool, block_table, offset, block, heads_kv, width, width_v)
    return q.new_empty((q.shape[0], q.shape[1], width_v))


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    offset: int,
    block: int,
    heads_kv: int,
    width: int,
    width_v: int,
) -> None:
    """Raises ValueError for shapes, dtypes and numbers that do not fit together."""
    if q.dtype not in _DTYPES or q.dim() != 3 or q.shape[2] != width:
        raise ValueError(
            f"paged_attention: q: expected float32, bfloat16 or float16 [tokens, heads, {width}], got {q.dtype} "
            f"{tuple(q.shape)}"
        )
    if heads_kv < 1 or q.shape[1] % heads_kv:
        raise ValueError(f"paged_attention: {q.shape[1]} heads do not divide into {heads_kv} KV heads")
    if block < 1 or block % BLOCK_UNIT:
        raise ValueError(f"paged_attention: block: expected a multiple of {BLOCK_UNIT}, got {block}")
    if (k is None) != (v is None):
        raise ValueError("paged_attention: expected both k and v, or neither")
    if pool.dtype not in (q.dtype, *LARGEST_CODE) or pool.dim() != 2:
        expected = ", ".join(map(str, (q.dtype, *LARGEST_CODE)))
        raise ValueError(
            f"paged_attention: pool: expected [blocks, elements] of one of {expected}, got {pool.dtype} "
            f"{tuple(pool.shape)}"
        )
    if pool.dtype in LARGEST_CODE and (offset % ALIGNMENT or pool.stride(0) % ALIGNMENT):
        raise ValueError(
            f"paged_attention: pool: expected an offset and a stride that are multiples of {ALIGNMENT} in "
            f"{pool.dtype}, got {offset} and {pool.stride(0)}"
        )
    needed = offset + block_elements(pool.dtype, heads_kv, block, width, width_v)
    if offset < 0 or pool.shape[1] < needed:
        raise ValueError(f"paged_attention: pool: expected blocks of {needed} elements or more, got {pool.shape[1]}")
    if block_table.dim() != 2:
        raise ValueError(f"paged_attention: block_table: expected [sequences, columns], got {tuple(block_table.shape)}")


OPERATOR = torch.ops.untorch.paged_attention.default
