"""Split-K decode attention: programs take blocks of keys of few queries; a second kernel reduces the partial results.

    q      [batch, heads_kv, group · queries, width]   one tile of BLOCK_M ≥ 16 rows: every query that reads these keys
    k, v   [batch, heads_kv, keys, width]              program s of S takes the blocks s, s + S, s + 2·S …
    parts  [batch · heads_kv, S, group · queries, width_v] float32, with the maximum and the sum of each row
    out    [batch, heads, queries, width_v]

Roofline: memory-bound. Keys and values are read once, 2 · keys · width elements a head of k; the rest is small. Blocks
are assigned round-robin, so that a partly filled cache keeps all programs busy: fully masked blocks at both ends are
skipped.
"""

import triton
import triton.language as tl

from untorch.ops.attention.prefill import attend, dot, load_rows, rounded, score_mask

__all__ = ["combine", "decode"]


@triton.jit
def _is_visible(mask, offsets, inside, MASK: tl.constexpr):
    """1 if the mask lets any query see any key of a block, else 0."""
    if MASK == 1:
        seen = tl.load(mask + offsets, inside, other=0).to(tl.int1)
    else:
        seen = tl.load(mask + offsets, inside, other=float("-inf")) > float("-inf")
    return tl.max(tl.max(seen.to(tl.int32), 1), 0)


@triton.jit
def decode(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, parts_ptr, peaks_ptr, totals_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_ob, stride_oh, stride_om,
    heads_kv, group, queries, keys, splits,
    SCALE: tl.constexpr, NEGATE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, SINGLE: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Grid: [batch * heads_kv * splits]. SINGLE: there is one split, which writes the result.

    EVEN: keys are a multiple of BLOCK_N. ALIGN: strides of k and v are multiples of it.
    """
    stride_kb, stride_kh, stride_kn = rounded(stride_kb, ALIGN), rounded(stride_kh, ALIGN), rounded(stride_kn, ALIGN)
    stride_vb, stride_vh, stride_vn = rounded(stride_vb, ALIGN), rounded(stride_vh, ALIGN), rounded(stride_vn, ALIGN)
    queries, keys, splits = tl.cast(queries, tl.int32), tl.cast(keys, tl.int32), tl.cast(splits, tl.int32)
    heads_kv, group = tl.cast(heads_kv, tl.int32), tl.cast(group, tl.int32)
    program = tl.program_id(0)
    split, pair = program % splits, program // splits
    batch, head_kv = tl.cast(pair // heads_kv, tl.int64), pair % heads_kv
    k_ptr += batch * stride_kb + tl.cast(head_kv, tl.int64) * stride_kh
    v_ptr += batch * stride_vb + tl.cast(head_kv, tl.int64) * stride_vh

    r = tl.arange(0, BLOCK_M)
    rows = group * queries
    heads = tl.cast(head_kv * group + r // queries, tl.int64)
    m = tl.cast(r % queries, tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    q_offsets = batch * stride_qb + heads * stride_qh + m * stride_qm
    q = tl.load(q_ptr + q_offsets[:, None] + d[None, :], (r < rows)[:, None] & (d < WIDTH)[None, :], other=0.0)
    if NEGATE:
        q = -q
    mask_rows = batch * stride_mb + heads * stride_mh + m * stride_mm

    first = 0
    last = (tl.cdiv(keys, BLOCK_N) + splits - 1 - split) // splits
    if MASK != 0:
        searching = first < last
        while searching:
            columns = (split + (last - 1) * splits) * BLOCK_N + n
            offsets = mask_rows[:, None] + tl.cast(columns, tl.int64)[None, :] * stride_mn
            visible = _is_visible(mask_ptr, offsets, (r < rows)[:, None] & (columns < keys)[None, :], MASK)
            last += visible - 1
            searching = (visible == 0) & (first < last)
        searching = first < last
        while searching:
            columns = (split + first * splits) * BLOCK_N + n
            offsets = mask_rows[:, None] + tl.cast(columns, tl.int64)[None, :] * stride_mn
            visible = _is_visible(mask_ptr, offsets, (r < rows)[:, None] & (columns < keys)[None, :], MASK)
            first += 1 - visible
            searching = (visible == 0) & (first < last)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    offsets_k = n[:, None] * stride_kn + d[None, :]
    offsets_v = n[:, None] * stride_vn + dv[None, :]
    for i in tl.range(first, last):
        start = (split + i * splits) * BLOCK_N
        columns = start + n
        k_block = k_ptr + tl.cast(start, tl.int64) * stride_kn + offsets_k
        v_block = v_ptr + tl.cast(start, tl.int64) * stride_vn + offsets_v
        k_tile = load_rows(k_block, columns, keys, d, WIDTH, BLOCK_D, EVEN)
        v_tile = load_rows(v_block, columns, keys, dv, WIDTH_V, BLOCK_DV, EVEN)
        scores = dot(q, tl.trans(k_tile), None, PRECISE)
        if MASK != 0:
            inside = (r < rows)[:, None] & (columns < keys)[None, :]
            offsets = mask_rows[:, None] + tl.cast(columns, tl.int64)[None, :] * stride_mn
            scores = score_mask(mask_ptr, offsets, inside, scores * SCALE, MASK)
        if not EVEN:
            scores = tl.where((columns < keys)[None, :], scores, float("-inf"))
        acc, peak, total = attend(scores, v_tile, acc, peak, total, SCALE, MASK, PRECISE)

    if SINGLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_offsets = batch * stride_ob + heads * stride_oh + m * stride_om
        inside = (r < rows)[:, None] & (dv < WIDTH_V)[None, :]
        tl.store(out_ptr + out_offsets[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), inside)
    else:
        row = tl.cast(program, tl.int64) * rows + r
        tl.store(peaks_ptr + row, peak, r < rows)
        tl.store(totals_ptr + row, total, r < rows)
        tl.store(parts_ptr + row[:, None] * WIDTH_V + dv[None, :], acc, (r < rows)[:, None] & (dv < WIDTH_V)[None, :])


@triton.jit
def combine(
    out_ptr, parts_ptr, peaks_ptr, totals_ptr, stride_ob, stride_oh, stride_om,
    heads_kv, group, queries, splits,
    WIDTH_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: [batch * heads_kv * group * queries]. Reduces the partial results of one row, BLOCK_S of them in a step."""
    queries, splits = tl.cast(queries, tl.int32), tl.cast(splits, tl.int32)
    heads_kv, group = tl.cast(heads_kv, tl.int32), tl.cast(group, tl.int32)
    rows = group * queries
    pair, r = tl.program_id(0) // rows, tl.program_id(0) % rows
    batch = tl.cast(pair // heads_kv, tl.int64)
    head = tl.cast(pair % heads_kv * group + r // queries, tl.int64)
    s = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    peak = float("-inf")
    total = 0.0
    for start in tl.range(0, splits, BLOCK_S):
        inside = start + s < splits
        row = (tl.cast(pair, tl.int64) * splits + start + s) * rows + r
        peaks = tl.load(peaks_ptr + row, inside, other=float("-inf"))
        totals = tl.load(totals_ptr + row, inside, other=0.0)
        parts = tl.load(
            parts_ptr + row[:, None] * WIDTH_V + dv[None, :], inside[:, None] & (dv < WIDTH_V)[None, :], other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(peaks - shift)
        decay = tl.math.exp2(peak - shift)
        total = total * decay + tl.sum(totals * weights, 0)
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)
    offset = batch * stride_ob + head * stride_oh + tl.cast(r % queries, tl.int64) * stride_om
    tl.store(out_ptr + offset + dv, acc.to(out_ptr.dtype.element_ty), dv < WIDTH_V)
