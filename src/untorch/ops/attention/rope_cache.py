"""RMSNorm of query and key heads, rotary embedding, and the write of keys and values to pages, in one kernel.

    q     [tokens, heads, WIDTH]       a program takes BLOCK_T tokens of one head of q, or of one KV head: k and v
    out   [tokens, heads, WIDTH]       q, normalised and rotated
    cos, sin [tokens, ROTARY]          of the first ROTARY elements of a head; the others stay
    pool  [blocks, elements]           pages of K and V, as in paged.py

An element's partner in its rotation is loaded a second time, from L1: halves of a row lie in other threads' registers.
Everything is computed in float32, and rounded once.

Roofline: reads q, k, v, writes q once and k, v to their slots: 2 · (heads + heads_kv) · WIDTH + 2 · heads_kv · WIDTH_V
elements a token. For the few tokens of decoding that is the time of a launch.
"""

import triton
import triton.language as tl

from untorch.ops.attention.paged import _quantize, _scales

__all__ = ["rope_cache"]


@triton.jit
def _rotated(
    x_ptr, rows, weight_ptr, cos_ptr, cos_rows, sin_ptr, sin_rows, inside,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Rows of a head [tokens, BLOCK_D], float32: x · cos + rotate(x) · sin, of normalised x with NORM."""
    d = tl.arange(0, BLOCK_D)
    turned = d < ROTARY
    if INTERLEAVED:
        is_first = d % 2 == 0
        partner = tl.where(is_first, d + 1, d - 1)
    else:
        is_first = d < ROTARY // 2
        partner = tl.where(is_first, d + ROTARY // 2, d - ROTARY // 2)
    partner = tl.where(turned, partner, d)
    present = inside[:, None] & (d < WIDTH)[None, :]
    moved = inside[:, None] & turned[None, :]
    x = tl.load(x_ptr + rows[:, None] + d[None, :], present, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + rows[:, None] + partner[None, :], moved, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + EPS)
        weight = tl.load(weight_ptr + d, d < WIDTH, other=0.0).to(tl.float32)
        others = tl.load(weight_ptr + partner, turned, other=0.0).to(tl.float32)
        x, y = x * scale[:, None] * weight[None, :], y * scale[:, None] * others[None, :]
    cos = tl.load(cos_ptr + cos_rows[:, None] + d[None, :], moved, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + sin_rows[:, None] + d[None, :], moved, other=0.0).to(tl.float32)
    return x * cos + tl.where(is_first, -1.0, 1.0)[None, :] * y * sin


@triton.jit
def rope_cache(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, offset_ptr, out_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ct, stride_st, stride_pool,
    tokens, blocks,
    HEADS: tl.constexpr, HEADS_KV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr, EPS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, ALIGNED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid: [blocks of BLOCK_T tokens * (HEADS + HEADS_KV)]. A slot of -1 is written nowhere.

    LARGEST: of the pool's codes; 0: it holds elements.
    """
    offset = tl.load(offset_ptr)
    if ALIGNED:
        stride_qt, stride_qh = stride_qt // 16 * 16, stride_qh // 16 * 16
        stride_kt, stride_kh = stride_kt // 16 * 16, stride_kh // 16 * 16
        stride_vt, stride_vh = stride_vt // 16 * 16, stride_vh // 16 * 16
        stride_pool, offset = stride_pool // 16 * 16, offset // 16 * 16
    head = tl.program_id(0) % (HEADS + HEADS_KV)
    t = tl.program_id(0) // (HEADS + HEADS_KV) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside, t64 = t < tokens, tl.cast(t, tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if head < HEADS:
        rows = _rotated(
            q_ptr, t64 * stride_qt + tl.cast(head, tl.int64) * stride_qh, q_weight_ptr, cos_ptr, t64 * stride_ct,
            sin_ptr, t64 * stride_st, inside, WIDTH, ROTARY, BLOCK_D, INTERLEAVED, NORM_Q, EPS,
        )  # fmt: skip
        places = (t64 * HEADS + head) * WIDTH
        tl.store(out_ptr + places[:, None] + d[None, :], rows, inside[:, None] & (d < WIDTH)[None, :])
    else:
        head_kv = tl.cast(head - HEADS, tl.int64)
        slots = tl.load(slots_ptr + t, inside, other=-1)
        written = (slots >= 0) & (slots < tl.cast(blocks, tl.int64) * BLOCK)
        slots = tl.where(written, slots, 0)
        pages, places = slots // BLOCK, slots % BLOCK
        source = pool_ptr + pages * stride_pool + offset
        keys = _rotated(
            k_ptr, t64 * stride_kt + head_kv * stride_kh, k_weight_ptr, cos_ptr, t64 * stride_ct,
            sin_ptr, t64 * stride_st, written, WIDTH, ROTARY, BLOCK_D, INTERLEAVED, NORM_K, EPS,
        )  # fmt: skip
        keys = keys.to(k_ptr.dtype.element_ty)  # what the codes are made of
        if LARGEST > 0:
            scales = _scales(pool_ptr, offset, head_kv, HEADS_KV, BLOCK, WIDTH + WIDTH_V)
            scales += pages * (stride_pool // 2) + places
            keys, bits = _quantize(keys, pool_ptr.dtype.element_ty, LARGEST)
            tl.store(scales, bits, written)
        present = written[:, None] & (d < WIDTH)[None, :]
        tl.store(source[:, None] + (head_kv * (BLOCK * WIDTH) + places * WIDTH)[:, None] + d[None, :], keys, present)
        present = written[:, None] & (dv < WIDTH_V)[None, :]
        values = tl.load(v_ptr + (t64 * stride_vt + head_kv * stride_vh)[:, None] + dv[None, :], present, other=0.0)
        rows_v = HEADS_KV * (BLOCK * WIDTH) + head_kv * (BLOCK * WIDTH_V) + places * WIDTH_V
        if LARGEST > 0:
            values, bits = _quantize(values, pool_ptr.dtype.element_ty, LARGEST)
            tl.store(scales + HEADS_KV * BLOCK, bits, written)
        tl.store(source[:, None] + rows_v[:, None] + dv[None, :], values, present)
