"""Paged attention for ragged batches: unified prefill, split-KV decode, and the write of new keys and values.

    q     [tokens, heads, width]       a tile of BLOCK_M rows: BLOCK_Q tokens by the heads that share a KV head (GQA)
    pool  [blocks, elements]           a block has, from ``offset`` on, K [heads_kv, BLOCK, width], V [heads_kv, BLOCK,
                                       width_v]; tiles of BLOCK_N keys are gathered through block_table. A pool of
                                       int8 or E4M3 holds codes to LARGEST; scales of K and V [heads_kv, BLOCK] follow
    parts [rows, heads, splits, width_v]  float32, with the maximum and the sum of each row: decode with several splits
    out   [tokens, heads, width_v]

Sequences of more than BLOCK_Q tokens of the decode tile are the prefill kernel's, the others are the decode kernel's,
whose programs take contiguous parts of a sequence's keys; a second kernel reduces the partial results. Which sequence a
program serves, it reads on the GPU; grids depend on shapes alone, so a CUDA graph serves any lengths. ``offset`` is
read there, too: layers that differ by it alone then share their kernels. A width that is no power of two is two GEMMs,
576 = 512 + 64.

Keys that no row of a tile sees are not loaded: pages outside of windows may hold anything. Pages and slots out of range
are read as page 0, and not written.

Codes become elements of q's dtype in registers: both kinds are exact there. The scale of a key goes into its column of
scores, that of a value into its weights; in float16, where a weight times a small scale would be subnormal, into the
value itself.

Roofline: decode reads keys and values once, heads_kv · (width + width_v) elements a position, and is memory-bound to
about 100 rows a KV head in 16 bits, to half as many in one byte. Prefill as the kernel for contiguous keys: BLOCK_M
operations a byte.
"""

import triton
import triton.language as tl

from untorch.ops.attention.prefill import attend, dot

__all__ = ["paged_combine", "paged_decode", "paged_prefill", "write_pages"]


@triton.jit
def _scales(pool_ptr, offset, head, HEADS_KV: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """The head's scales of keys in page 0, as bits of bfloat16; those of values follow after HEADS_KV * BLOCK.

    SIZE: bytes of a key and a value.
    """
    pointer = tl.cast(pool_ptr, tl.pointer_type(tl.int16), bitcast=True)
    return pointer + (offset + HEADS_KV * (BLOCK * SIZE)) // 2 + head * BLOCK


@triton.jit
def _load_scales(pointers, seen):
    return (tl.load(pointers, seen, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(rows, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """Codes of rows, and bits of their scales: as kv_pages.quantize_rows has them."""
    rows = rows.to(tl.float32)
    largest = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # ordered as the floats are, NaN above all
    finite = largest < 0x7F800000
    scale = largest.to(tl.float32, bitcast=True) * (1.0 / LARGEST)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    used = finite & (bits > 0)
    codes = tl.where(used[:, None], tl.math.div_rn(rows, tl.where(used, scale, 1.0)[:, None]), 0.0)
    if LARGEST == 127.0:
        # 1.5 * 2^23: adding it rounds to an integer, in the low bits.
        codes = (codes + 12582912.0).to(tl.int32, bitcast=True)
    else:
        # E4M3 by its bits: the interpreter does not round subnormals. 16384 has units of 2^-9, the smallest of them.
        word = codes.to(tl.int32, bitcast=True)
        magnitude = word & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        tiny = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(magnitude < 0x3C800000, tiny, normal) | ((word >> 24) & 0x80)
    codes = codes.to(tl.int8).to(DTYPE, bitcast=True)
    return codes, tl.where(finite, bits >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def write_pages(
    k_ptr, v_ptr, pool_ptr, slots_ptr, offset_ptr, stride_kt, stride_kh, stride_vt, stride_vh, stride_pool,
    tokens, blocks,
    HEADS_KV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, ALIGNED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid: [blocks of BLOCK_T tokens * heads_kv]. Copies k and v of each token to its slot; -1: nowhere.

    LARGEST: of the pool's codes; 0: it holds elements.
    """
    offset = tl.load(offset_ptr)
    if ALIGNED:
        stride_kt, stride_kh = stride_kt // 16 * 16, stride_kh // 16 * 16
        stride_vt, stride_vh = stride_vt // 16 * 16, stride_vh // 16 * 16
        stride_pool, offset = stride_pool // 16 * 16, offset // 16 * 16
    head = tl.cast(tl.program_id(0) % HEADS_KV, tl.int64)
    t = tl.program_id(0) // HEADS_KV * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + t, t < tokens, other=-1)
    written = (slots >= 0) & (slots < tl.cast(blocks, tl.int64) * BLOCK)
    slots = tl.where(written, slots, 0)
    pages, places = slots // BLOCK, slots % BLOCK
    source, t64 = pool_ptr + pages * stride_pool + offset, tl.cast(t, tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    inside = written[:, None] & (d < WIDTH)[None, :]
    keys = tl.load(k_ptr + (t64 * stride_kt + head * stride_kh)[:, None] + d[None, :], inside, other=0.0)
    if LARGEST > 0:
        scales = _scales(pool_ptr, offset, head, HEADS_KV, BLOCK, WIDTH + WIDTH_V) + pages * (stride_pool // 2) + places
        keys, bits = _quantize(keys, pool_ptr.dtype.element_ty, LARGEST)
        tl.store(scales, bits, written)
    tl.store(source[:, None] + (head * (BLOCK * WIDTH) + places * WIDTH)[:, None] + d[None, :], keys, inside)
    inside = written[:, None] & (dv < WIDTH_V)[None, :]
    values = tl.load(v_ptr + (t64 * stride_vt + head * stride_vh)[:, None] + dv[None, :], inside, other=0.0)
    rows = HEADS_KV * (BLOCK * WIDTH) + head * (BLOCK * WIDTH_V) + places * WIDTH_V
    if LARGEST > 0:
        values, bits = _quantize(values, pool_ptr.dtype.element_ty, LARGEST)
        tl.store(scales + HEADS_KV * BLOCK, bits, written)
    tl.store(source[:, None] + rows[:, None] + dv[None, :], values, inside)


@triton.jit
def _visible(first, last, length, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Of queries at the positions first to last: the keys that any of them sees, and those that all of them see."""
    low, all_low = 0, 0
    if WINDOW > 0:
        low, all_low = tl.maximum(first - WINDOW + 1, 0), tl.maximum(last - WINDOW + 1, 0)
    if CHUNK > 0:
        low, all_low = tl.maximum(low, first // CHUNK * CHUNK), tl.maximum(all_low, last // CHUNK * CHUNK)
    return low, tl.minimum(last + 1, length), all_low, tl.minimum(first + 1, length)


@triton.jit
def _splits(first, count, length, most, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """Of the queries from the first on: their first key's block, the keys of a split, and how many splits have keys.

    most: splits that there are.
    """
    past = length - count
    low, high, _, _ = _visible(
        past + first, past + tl.minimum(first + BLOCK_Q, count) - 1, length, WINDOW, CHUNK
    )  # fmt: skip
    start = low // BLOCK_N * BLOCK_N
    blocks = tl.maximum(tl.cdiv(tl.cdiv(high - start, BLOCK_N), most), 1)
    return start, blocks * BLOCK_N, tl.maximum(tl.cdiv(high - start, blocks * BLOCK_N), 1)


@triton.jit
def _load_q(q_ptr, offsets, inside, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    d = START + tl.arange(0, SIZE)
    return tl.load(q_ptr + offsets[:, None] + d[None, :], inside[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _load_keys(base, rows, seen, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    d = START + tl.arange(0, SIZE)
    inside = seen[:, None]
    if START + SIZE != WIDTH:
        inside = inside & (d < WIDTH)[None, :]
    return tl.load(base + rows[:, None] + d[None, :], inside, other=0.0)


@triton.jit
def _attend_pages(
    q, q_rest, k_base, v_base, scale_base, table_ptr, positions, slopes, begin, end, low, high, all_low, all_high,
    acc, peak, total, stride_pool, blocks,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALIBI: tl.constexpr,
    HEADS_KV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The keys from begin (a multiple of BLOCK_N) to end into the running softmax of a tile of queries.

    k_base, v_base, scale_base: the KV head's place in page 0. positions, slopes: of each row. low, high, all_low,
    all_high: as _visible gives them.
    """
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + n
        seen = (columns >= low) & (columns < high)
        if BLOCK % BLOCK_N == 0:
            page = tl.load(table_ptr + start // BLOCK)
            page = tl.where((page >= 0) & (page < blocks), page, 0)
            pages = tl.cast(page, tl.int64) * stride_pool + tl.zeros((BLOCK_N,), tl.int64)
        else:
            page = tl.load(table_ptr + columns // BLOCK, seen, other=0)
            page = tl.where((page >= 0) & (page < blocks), page, 0)
            pages = tl.cast(page, tl.int64) * stride_pool
        places = columns % BLOCK
        k_rows = pages + places * WIDTH
        keys = _load_keys(k_base, k_rows, seen, 0, BLOCK_D, WIDTH)
        scores = dot(q, tl.trans(keys.to(q.dtype)), None, PRECISE)
        if BLOCK_REST > 0:
            keys = _load_keys(k_base, k_rows, seen, BLOCK_D, BLOCK_REST, WIDTH)
            scores = dot(q_rest, tl.trans(keys.to(q.dtype)), scores, PRECISE)
        if LARGEST > 0:
            scale_rows = pages // 2 + places
            scores = scores * _load_scales(scale_base + scale_rows, seen)[None, :]
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + e^2x)
            power = tl.math.exp2(scores * (SCALE / SOFTCAP * 2.8853900817779268))
            scores = (1.0 - 2.0 / (1.0 + power)) * (SOFTCAP * 1.4426950408889634)
        else:
            scores = scores * (SCALE * 1.4426950408889634)
        if ALIBI:
            distance = columns[None, :] - positions[:, None]
            scores += slopes[:, None] * tl.cast(distance, tl.float32)
        if (start < all_low) | (start + BLOCK_N > all_high):
            visible = columns[None, :] <= positions[:, None]
            visible = visible & seen[None, :]
            if WINDOW > 0:
                visible = visible & (columns[None, :] > positions[:, None] - WINDOW)
            if CHUNK > 0:
                visible = visible & (columns[None, :] >= (positions // CHUNK * CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        values = _load_keys(v_base, pages + places * WIDTH_V, seen, 0, BLOCK_DV, WIDTH_V)
        v_scales = None
        if LARGEST > 0:
            v_scales = _load_scales(scale_base + HEADS_KV * BLOCK + scale_rows, seen)
            if q.dtype == tl.float16:
                values = values.to(tl.float32) * v_scales[:, None]
                v_scales = None
            values = values.to(q.dtype)
        acc, peak, total = attend(scores, values, acc, peak, total, 1.0, 1, PRECISE, v_scales)
    return acc, peak, total


@triton.jit
def _softmax_state(sinks_ptr, heads, inside, first_split, SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The maximum and the sum that a row begins with: its sink's, in one split."""
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + heads, inside & first_split, other=float("-inf")) * 1.4426950408889634
        peak = sink
        total = tl.where(sink > float("-inf"), 1.0, 0.0)
    return peak, total


@triton.jit
def paged_prefill(
    q_ptr, pool_ptr, table_ptr, ends_ptr, lengths_ptr, offset_ptr, sinks_ptr, alibi_ptr, out_ptr,
    stride_qt, stride_qh, stride_pool, tokens, sequences, columns, blocks, queries,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, HEADS_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, PRECISE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid: [queries * heads_kv * tiles of a group's heads]; queries: the most blocks of BLOCK_Q tokens there can be.

    GROUP: heads of q for each KV head; GROUP_TILE: those of a program. FEW: sequences of so few tokens are decode's.
    columns: of the block table.
    """
    offset = tl.load(offset_ptr)
    if ALIGNED:
        stride_qt, stride_qh = stride_qt // 16 * 16, stride_qh // 16 * 16
        stride_pool, offset = stride_pool // 16 * 16, offset // 16 * 16
    tokens, sequences = tl.cast(tokens, tl.int32), tl.cast(sequences, tl.int32)
    columns, blocks = tl.cast(columns, tl.int32), tl.cast(blocks, tl.int32)
    TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    pair = tl.program_id(0) % (HEADS_KV * TILES)
    # The last blocks of a sequence see the most keys, and come first.
    block = tl.cast(queries, tl.int32) - 1 - tl.program_id(0) // (HEADS_KV * TILES)
    # A sequence's blocks begin at ends // BLOCK_Q + its number, which leaves room for those before it.
    left, right = 0, sequences
    while left < right:
        middle = (left + right) // 2
        before = tl.load(ends_ptr + middle) // BLOCK_Q + middle <= block
        left = tl.where(before, middle + 1, left)
        right = tl.where(before, right, middle)
    sequence = tl.maximum(left - 1, 0)
    begin = tl.load(ends_ptr + sequence)
    count = tl.load(ends_ptr + sequence + 1) - begin
    length = tl.minimum(tl.load(lengths_ptr + sequence), columns * BLOCK)
    first = (block - begin // BLOCK_Q - sequence) * BLOCK_Q
    active = (count > FEW) & (first >= 0) & (first < count)

    r = tl.arange(0, BLOCK_M)
    local = first + r // GROUP_TILE
    in_group = pair % TILES * GROUP_TILE + r % GROUP_TILE
    heads = pair // TILES * GROUP + in_group
    inside = active & (r < BLOCK_Q * GROUP_TILE) & (in_group < GROUP) & (local < count) & (begin + local < tokens)
    past = length - count
    positions = past + tl.minimum(local, count - 1)
    last = past + tl.minimum(first + BLOCK_Q, count) - 1
    low, high, all_low, all_high = _visible(past + first, last, length, WINDOW, CHUNK)
    high = tl.where(active, high, low)

    row = tl.cast(begin + local, tl.int64)
    q_offsets = row * stride_qt + tl.cast(heads, tl.int64) * stride_qh
    q = _load_q(q_ptr, q_offsets, inside, 0, BLOCK_D, WIDTH)
    q_rest = q
    if BLOCK_REST > 0:
        q_rest = _load_q(q_ptr, q_offsets, inside, BLOCK_D, BLOCK_REST, WIDTH)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_ptr + heads, inside, other=0.0) * 1.4426950408889634
    peak, total = _softmax_state(sinks_ptr, heads, inside, True, SINKS, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    head = tl.cast(pair // TILES, tl.int64)
    k_base = pool_ptr + offset + head * (BLOCK * WIDTH)
    v_base = pool_ptr + offset + (HEADS_KV * (BLOCK * WIDTH) + head * (BLOCK * WIDTH_V))
    scale_base = _scales(pool_ptr, offset, head, HEADS_KV, BLOCK, WIDTH + WIDTH_V)
    acc, peak, total = _attend_pages(
        q, q_rest, k_base, v_base, scale_base, table_ptr + tl.cast(sequence, tl.int64) * columns, positions, slopes,
        low // BLOCK_N * BLOCK_N, high, low, high, all_low, all_high, acc, peak, total, stride_pool, blocks,
        SCALE, SOFTCAP, WINDOW, CHUNK, ALIBI, HEADS_KV, BLOCK, WIDTH, WIDTH_V, BLOCK_D, BLOCK_REST, BLOCK_DV, BLOCK_N,
        PRECISE, LARGEST,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    dv = tl.arange(0, BLOCK_DV)
    out_rows = (row * (HEADS_KV * GROUP) + heads) * WIDTH_V
    out_inside = inside[:, None] & (dv < WIDTH_V)[None, :]
    tl.store(out_ptr + out_rows[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), out_inside)


@triton.jit
def paged_decode(
    q_ptr, pool_ptr, table_ptr, ends_ptr, lengths_ptr, offset_ptr, sinks_ptr, alibi_ptr, out_ptr,
    parts_ptr, peaks_ptr, totals_ptr,
    stride_qt, stride_qh, stride_pool, tokens, sequences, columns, blocks, splits,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, HEADS_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, PRECISE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid: [(sequences + 1) * heads_kv * tiles of a group's heads * splits].

    Splits without keys write nothing; where one has all of them, it writes the result.
    The programs behind the last sequence write zeros for the tokens behind it. With no more tokens than sequences there
    is no prefill, and a sequence of more than BLOCK_Q tokens, beside empty ones, is served here, too.
    """
    offset = tl.load(offset_ptr)
    if ALIGNED:
        stride_qt, stride_qh = stride_qt // 16 * 16, stride_qh // 16 * 16
        stride_pool, offset = stride_pool // 16 * 16, offset // 16 * 16
    tokens, sequences = tl.cast(tokens, tl.int32), tl.cast(sequences, tl.int32)
    columns, blocks, splits = tl.cast(columns, tl.int32), tl.cast(blocks, tl.int32), tl.cast(splits, tl.int32)
    TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    split, pair = tl.program_id(0) % splits, tl.program_id(0) // splits
    sequence, pair = pair // (HEADS_KV * TILES), pair % (HEADS_KV * TILES)
    is_sequence = sequence < sequences
    begin = tl.load(ends_ptr + sequence)
    count = tl.load(ends_ptr + sequence + 1, is_sequence, other=0) - begin
    length = tl.minimum(tl.load(lengths_ptr + sequence, is_sequence, other=0), columns * BLOCK)
    served = tl.where(is_sequence & ((count <= BLOCK_Q) | (tokens <= sequences)), count, 0)

    r = tl.arange(0, BLOCK_M)
    in_group = pair % TILES * GROUP_TILE + r % GROUP_TILE
    heads = pair // TILES * GROUP + in_group
    rows_inside = (r < BLOCK_Q * GROUP_TILE) & (in_group < GROUP)
    dv = tl.arange(0, BLOCK_DV)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_ptr + heads, rows_inside, other=0.0) * 1.4426950408889634
    head = tl.cast(pair // TILES, tl.int64)
    k_base = pool_ptr + offset + head * (BLOCK * WIDTH)
    v_base = pool_ptr + offset + (HEADS_KV * (BLOCK * WIDTH) + head * (BLOCK * WIDTH_V))
    scale_base = _scales(pool_ptr, offset, head, HEADS_KV, BLOCK, WIDTH + WIDTH_V)
    past = length - count
    for first in tl.range(0, served, BLOCK_Q):
        local = first + r // GROUP_TILE
        inside = rows_inside & (local < count) & (begin + local < tokens)
        positions = past + tl.minimum(local, count - 1)
        last = past + tl.minimum(first + BLOCK_Q, count) - 1
        low, high, all_low, all_high = _visible(past + first, last, length, WINDOW, CHUNK)
        start, part, used = _splits(first, count, length, splits, WINDOW, CHUNK, BLOCK_Q, BLOCK_N)
        start += split * part
        stop = tl.minimum(start + part, high)
        inside &= split < used

        row = tl.cast(begin + local, tl.int64)
        q_offsets = row * stride_qt + tl.cast(heads, tl.int64) * stride_qh
        q = _load_q(q_ptr, q_offsets, inside, 0, BLOCK_D, WIDTH)
        q_rest = q
        if BLOCK_REST > 0:
            q_rest = _load_q(q_ptr, q_offsets, inside, BLOCK_D, BLOCK_REST, WIDTH)
        peak, total = _softmax_state(sinks_ptr, heads, inside, split == 0, SINKS, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        acc, peak, total = _attend_pages(
            q, q_rest, k_base, v_base, scale_base, table_ptr + tl.cast(sequence, tl.int64) * columns, positions, slopes,
            start, stop, low, high, all_low, all_high, acc, peak, total, stride_pool, blocks,
            SCALE, SOFTCAP, WINDOW, CHUNK, ALIBI, HEADS_KV, BLOCK, WIDTH, WIDTH_V, BLOCK_D, BLOCK_REST, BLOCK_DV,
            BLOCK_N, PRECISE, LARGEST,
        )  # fmt: skip
        stored = inside[:, None] & (dv < WIDTH_V)[None, :]
        if used == 1:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            out_rows = (row * (HEADS_KV * GROUP) + heads) * WIDTH_V
            tl.store(out_ptr + out_rows[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), stored)
        else:
            kept = tl.where(tokens <= sequences, begin + local, sequence * BLOCK_Q + local)
            part_rows = (tl.cast(kept, tl.int64) * (HEADS_KV * GROUP) + heads) * splits + split
            tl.store(peaks_ptr + part_rows, peak, inside)
            tl.store(totals_ptr + part_rows, total, inside)
            tl.store(parts_ptr + part_rows[:, None] * WIDTH_V + dv[None, :], acc, stored)

    behind = tl.where(is_sequence | (split != 0), tokens, begin)
    nothing = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32).to(out_ptr.dtype.element_ty)
    for first in tl.range(behind, tokens, BLOCK_Q):
        local = first + r // GROUP_TILE
        out_rows = (tl.cast(local, tl.int64) * (HEADS_KV * GROUP) + heads) * WIDTH_V
        stored = (rows_inside & (local < tokens))[:, None] & (dv < WIDTH_V)[None, :]
        tl.store(out_ptr + out_rows[:, None] + dv[None, :], nothing, stored)


@triton.jit
def paged_combine(
    out_ptr, parts_ptr, peaks_ptr, totals_ptr, ends_ptr, lengths_ptr, tokens, sequences, columns, splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: [sequences * heads]. Reduces the partial results of decode, BLOCK_S of a row in a step."""
    columns = tl.cast(columns, tl.int32)
    tokens, sequences, splits = tl.cast(tokens, tl.int32), tl.cast(sequences, tl.int32), tl.cast(splits, tl.int32)
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin = tl.load(ends_ptr + sequence)
    count = tl.load(ends_ptr + sequence + 1) - begin
    length = tl.minimum(tl.load(lengths_ptr + sequence), columns * BLOCK)
    served = tl.where((count <= BLOCK_Q) | (tokens <= sequences), tl.minimum(count, tokens - begin), 0)
    s = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    for local in tl.range(0, served):
        first = local // BLOCK_Q * BLOCK_Q
        _, _, used = _splits(first, count, length, splits, WINDOW, CHUNK, BLOCK_Q, BLOCK_N)
        kept = tl.where(tokens <= sequences, begin + local, sequence * BLOCK_Q + local)
        first_row = (tl.cast(kept, tl.int64) * HEADS + head) * splits
        acc = tl.zeros((BLOCK_DV,), tl.float32)
        peak = float("-inf")
        total = 0.0
        for start in tl.range(0, tl.where(used > 1, used, 0), BLOCK_S):
            inside = start + s < used
            row = first_row + start + s
            peaks = tl.load(peaks_ptr + row, inside, other=float("-inf"))
            totals = tl.load(totals_ptr + row, inside, other=0.0)
            full = inside & (peaks > float("-inf"))
            parts = tl.load(
                parts_ptr + row[:, None] * WIDTH_V + dv[None, :], full[:, None] & (dv < WIDTH_V)[None, :], other=0.0
            )
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.math.exp2(peaks - shift)
            decay = tl.math.exp2(peak - shift)
            total = total * decay + tl.sum(totals * weights, 0)
            acc = acc * decay + tl.sum(parts * weights[:, None], 0)
            peak = new_peak
        acc = acc / tl.where(total == 0.0, 1.0, total)
        out_row = (tl.cast(begin + local, tl.int64) * HEADS + head) * WIDTH_V
        tl.store(out_ptr + out_row + dv, acc.to(out_ptr.dtype.element_ty), (dv < WIDTH_V) & (used > 1))
