"""Prefill attention with online softmax: softmax(q · kᵀ · scale + mask) · v, one program a block of queries of a head.

    q   [batch, heads, queries, width]          registers → shared memory, once
    k,v [batch, heads_kv, keys, width]          blocks of BLOCK_N keys, streamed through NUM_STAGES buffers
    out [batch, heads, queries, width_v]        an accumulator of float32 [BLOCK_M, BLOCK_DV] in registers

Each program keeps a running maximum and sum of its rows (in powers of two: the scale has log2 e folded in). Only
blocks that the diagonal or the end of the keys cuts are masked; those above the diagonal are skipped.

Roofline: 4 · queries · keys · width operations a head (half when causal); a program reads 2 · BLOCK_N · width elements
for 4 · BLOCK_M · BLOCK_N · width operations, BLOCK_M operations a byte in 16 bits. Device memory is too slow for that,
so programs of one wave share keys and values in L2.
"""

import triton
import triton.language as tl

__all__ = ["attend", "dot", "load_rows", "prefill", "rounded", "score_mask"]


@triton.jit
def rounded(stride, ALIGN: tl.constexpr):
    """A stride that is a multiple of ALIGN, as one that the compiler knows to be.

    Not tl.multiple_of: PyTorch's analysis of what a kernel writes gives it plain numbers, which that refuses.
    """
    return stride // ALIGN * ALIGN


@triton.jit
def dot(a, b, acc, PRECISE: tl.constexpr):
    """a * b + acc in float32. PRECISE: float32 operands as 3xTF32, instead of one TF32 GEMM."""
    if PRECISE:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    return tl.dot(a, b, acc)


@triton.jit
def load_rows(pointers, rows, count, lanes, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rows of keys or values, with zeros behind ``count`` rows, unless EVEN, and behind WIDTH of BLOCK lanes."""
    if EVEN and WIDTH == BLOCK:
        return tl.load(pointers)
    elif EVEN:
        return tl.load(pointers, (lanes < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        return tl.load(pointers, (rows < count)[:, None], other=0.0)
    else:
        return tl.load(pointers, (rows < count)[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@triton.jit
def score_mask(mask, pointers, inside, scores, MASK: tl.constexpr):
    """Scores (in powers of two) with a mask applied. MASK: 1 of bool, 2 additive."""
    if MASK == 1:
        return tl.where(tl.load(mask + pointers, inside, other=0).to(tl.int1), scores, float("-inf"))
    added = tl.load(mask + pointers, inside, other=0.0).to(tl.float32)
    # The lowest finite number stays finite: a row of them is a mean, a row of -inf is nothing.
    finite = tl.maximum(added * 1.4426950408889634, -3.3e38)
    return scores + tl.where(added == float("-inf"), added, finite)


@triton.jit
def attend(scores, v, acc, peak, total, SCALE: tl.constexpr, MASK: tl.constexpr, PRECISE: tl.constexpr, v_scales=None):
    """One block of keys into the running softmax. Without a mask, scores are not scaled yet.

    v_scales: of each key, for v that holds codes.
    """
    if MASK == 0:
        new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE)
        weights = tl.math.exp2(scores * SCALE - new_peak[:, None])
        decay = tl.math.exp2(peak - new_peak)
    else:
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet: -inf - -inf is not a number.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - shift[:, None])
        decay = tl.math.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    if v_scales is not None:
        weights = weights * v_scales[None, :]
    acc = dot(weights.to(v.dtype), v, acc * decay[:, None], PRECISE)
    return acc, new_peak, total


@triton.jit
def prefill(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_ob, stride_oh, stride_om,
    heads, group, pairs, together, queries, keys,
    SCALE: tl.constexpr, NEGATE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Grid: [blocks of queries * batch * heads].

    heads: of q; group: heads of q for each of k; pairs: batch * heads; together: how many pairs run at a time when
    CAUSAL. EVEN: keys are a multiple of BLOCK_N. ALIGN: strides of q, k and v are multiples of it.
    """
    stride_qb, stride_qh, stride_qm = rounded(stride_qb, ALIGN), rounded(stride_qh, ALIGN), rounded(stride_qm, ALIGN)
    stride_kb, stride_kh, stride_kn = rounded(stride_kb, ALIGN), rounded(stride_kh, ALIGN), rounded(stride_kn, ALIGN)
    stride_vb, stride_vh, stride_vn = rounded(stride_vb, ALIGN), rounded(stride_vh, ALIGN), rounded(stride_vn, ALIGN)
    queries, keys = tl.cast(queries, tl.int32), tl.cast(keys, tl.int32)
    heads, group, pairs = tl.cast(heads, tl.int32), tl.cast(group, tl.int32), tl.cast(pairs, tl.int32)
    blocks = tl.cdiv(queries, BLOCK_M)
    program = tl.program_id(0)
    if CAUSAL:
        # The long rows first, so that none is left for the end; of few heads at a time, for the cache.
        together = tl.cast(together, tl.int32)
        first_pair = program // (together * blocks) * together
        within = program % (together * blocks)
        size = tl.minimum(together, pairs - first_pair)
        block, pair = blocks - 1 - within // size, first_pair + within % size
    else:
        block, pair = program % blocks, program // blocks
    batch, head = tl.cast(pair // heads, tl.int64), pair % heads
    head_kv = tl.cast(head // group, tl.int64)
    head = tl.cast(head, tl.int64)
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    mask_ptr += batch * stride_mb + head * stride_mh

    top = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    rows = top + m
    q_ptr += batch * stride_qb + head * stride_qh + tl.cast(top, tl.int64) * stride_qm
    q_inside = (rows < queries)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(q_ptr + m[:, None] * stride_qm + d[None, :], q_inside, other=0.0)
    if NEGATE:
        q = -q

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    offsets_k = n[:, None] * stride_kn + d[None, :]
    offsets_v = n[:, None] * stride_vn + dv[None, :]
    mask_rows = tl.cast(rows, tl.int64)[:, None] * stride_mm
    # Every row sees the keys before the edge.
    edge, last = keys, keys
    if CAUSAL:
        edge, last = tl.minimum(keys, top + 1), tl.minimum(keys, top + BLOCK_M)
    for start in tl.range(0, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        columns = start + n
        k_block = k_ptr + tl.cast(start, tl.int64) * stride_kn + offsets_k
        v_block = v_ptr + tl.cast(start, tl.int64) * stride_vn + offsets_v
        k_tile = load_rows(k_block, columns, keys, d, WIDTH, BLOCK_D, EVEN)
        scores = dot(q, tl.trans(k_tile), None, PRECISE)
        if MASK != 0:
            inside = (rows < queries)[:, None] & (columns < keys)[None, :]
            offsets = mask_rows + tl.cast(columns, tl.int64)[None, :] * stride_mn
            scores = score_mask(mask_ptr, offsets, inside, scores * SCALE, MASK)
        if CAUSAL or not EVEN:
            # One loop with a branch that all threads take alike: with a second loop for the last blocks, the compiler
            # no longer runs matrix instructions side by side.
            if start + BLOCK_N > edge:
                seen = (columns < keys)[None, :]
                if CAUSAL:
                    seen = seen & (rows[:, None] >= columns[None, :])
                scores = tl.where(seen, scores, float("-inf"))
        v_tile = load_rows(v_block, columns, keys, dv, WIDTH_V, BLOCK_DV, EVEN)
        acc, peak, total = attend(scores, v_tile, acc, peak, total, SCALE, MASK, PRECISE)

    # A row that saw no key has a sum of zero, and its result is zero.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptr += batch * stride_ob + head * stride_oh + tl.cast(top, tl.int64) * stride_om
    out_inside = (rows < queries)[:, None] & (dv < WIDTH_V)[None, :]
    tl.store(out_ptr + m[:, None] * stride_om + dv[None, :], acc.to(out_ptr.dtype.element_ty), out_inside)
