"""Sampling on a GPU: temperature, min-p, top-k, top-p, and the inverse of the cumulative distribution.

    logits [rows, width]  float32, of which the first ``vocabulary`` columns count
    one program a token: it reads its row again and again, BLOCK logits at a time

With d = best - logit, which is at least 0, a token's weight is exp(-d / temperature), so top-k and top-p keep the
smallest d. The largest d that is kept is searched by bisection over the bits of d, which are ordered as d is: a pass
over the row for each bit. Of equal logits at the border the first ones stay. Sums have a fixed order.

Roofline: a row of 152,000 logits is 0.6 MB, read from L2 after the first pass: 2 passes greedy, 4 without top-k and
top-p, 31 more for each of them. Not measured.
"""

import triton
import triton.language as tl

__all__ = ["choose_tokens"]


@triton.jit
def _weights(row_ptr, start, vocabulary, best, inverse, min_p, BLOCK: tl.constexpr):
    """The bits of d, and the weights, of BLOCK tokens; those behind the vocabulary and below min-p weigh nothing."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, at < vocabulary, other=float("-inf"))
    d = best - x
    weights = tl.exp(-d * inverse)
    weights = tl.where((weights >= min_p) & (at < vocabulary), weights, 0.0)
    return d.to(tl.int32, bitcast=True), weights


@triton.jit
def _up_to(row_ptr, vocabulary, best, inverse, min_p, limit, BLOCK: tl.constexpr):
    """How many tokens have d with bits up to the limit and a weight, and what they weigh."""
    count, total = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        bits, weights = _weights(row_ptr, start, vocabulary, best, inverse, min_p, BLOCK)
        kept = (bits <= limit) & (weights > 0)
        count += tl.where(kept, 1, 0)
        total += tl.where(kept, weights, 0.0)
    return tl.sum(count), tl.sum(total)


@triton.jit
def choose_tokens(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, tokens_ptr,
    stride, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: [tokens]. -1 where a logit is no number, or none is finite."""
    which = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + which).to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + which)

    highest, places = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, at < vocabulary, other=float("-inf"))
        bad += tl.where((x != x) | (x == float("inf")), 1, 0)
        places = tl.where(x > highest, at, places)
        highest = tl.maximum(highest, x)
    best = tl.max(highest)
    token = tl.min(tl.where(highest == best, places, vocabulary))
    usable = (tl.sum(bad) == 0) & (best > float("-inf"))

    if usable & (temperature > 0):
        inverse, min_p = 1.0 / temperature, tl.load(min_p_ptr + which)
        top_k, top_p = tl.load(top_k_ptr + which), tl.load(top_p_ptr + which)
        # Kept are the tokens with bits below the limit, and of those with just these bits the first ``ties``.
        limit, ties = tl.full([], 0x7F800000, tl.int32), vocabulary
        count, total = _up_to(row_ptr, vocabulary, best, inverse, min_p, limit, BLOCK)
        if (top_k > 0) & (top_k < count):
            low = tl.full([], 0, tl.int32)
            while low < limit:
                middle = (low + (limit - low) // 2).to(tl.int32)
                found, _ = _up_to(row_ptr, vocabulary, best, inverse, min_p, middle, BLOCK)
                if found >= top_k:
                    limit = middle
                else:
                    low = (middle + 1).to(tl.int32)
            below, total = _up_to(row_ptr, vocabulary, best, inverse, min_p, limit - 1, BLOCK)
            ties = (top_k - below).to(tl.int32)
            total += ties * tl.exp(-limit.to(tl.float32, bitcast=True) * inverse)
        if top_p < 1:
            mass, low, high = top_p * total, tl.full([], 0, tl.int32), limit
            while low < high:
                middle = (low + (high - low) // 2).to(tl.int32)
                _, found_mass = _up_to(row_ptr, vocabulary, best, inverse, min_p, middle, BLOCK)
                if found_mass >= mass:
                    high = middle
                else:
                    low = (middle + 1).to(tl.int32)
            _, below_mass = _up_to(row_ptr, vocabulary, best, inverse, min_p, high - 1, BLOCK)
            each = tl.exp(-high.to(tl.float32, bitcast=True) * inverse)
            fewest = tl.maximum(1, tl.ceil((mass - below_mass) / tl.maximum(each, 1e-38)).to(tl.int32))
            # At the border of top-k there are not more ties than it left.
            ties = tl.where(high < limit, fewest, tl.minimum(fewest, ties))
            limit = high

        # Twice over the tokens that stay, in the order of their ids: the whole weight, then where the part is reached.
        whole, seen = 0.0, 0
        for start in range(0, vocabulary, BLOCK):
            bits, weights = _weights(row_ptr, start, vocabulary, best, inverse, min_p, BLOCK)
            tied = tl.where((bits == limit) & (weights > 0), 1, 0)
            kept = (bits < limit) | ((tied > 0) & (seen + tl.cumsum(tied) <= ties))
            whole += tl.sum(tl.where(kept, weights, 0.0))
            seen += tl.sum(tied)
        target = tl.load(uniform_ptr + which) * whole
        running, seen, chosen, last = 0.0, 0, vocabulary, token
        for start in range(0, vocabulary, BLOCK):
            bits, weights = _weights(row_ptr, start, vocabulary, best, inverse, min_p, BLOCK)
            at = start + tl.arange(0, BLOCK)
            tied = tl.where((bits == limit) & (weights > 0), 1, 0)
            kept = (bits < limit) | ((tied > 0) & (seen + tl.cumsum(tied) <= ties))
            weights = tl.where(kept, weights, 0.0)
            above = (running + tl.cumsum(weights) > target) & (weights > 0)
            chosen = tl.minimum(chosen, tl.min(tl.where(above, at, vocabulary)))
            last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0)))
            running += tl.sum(weights)
            seen += tl.sum(tied)
        # Rounding may put the whole a little lower than the target.
        token = tl.where(chosen < vocabulary, chosen, last)
    tl.store(tokens_ptr + which, tl.where(usable, token, -1).to(tl.int64))
