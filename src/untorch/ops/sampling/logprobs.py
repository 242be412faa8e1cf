"""Logprobs on a GPU: of the chosen token, its rank, and the most likely tokens.

    logits [rows, width]  float32, of which the first ``vocabulary`` columns count
    one program a token: it reads its row two times, and once more for each of the most likely tokens that are wanted

Of equal logits the first one is the more likely. Sums have a fixed order.
"""

import triton
import triton.language as tl

__all__ = ["token_logprobs"]


@triton.jit
def token_logprobs(
    logits_ptr, rows_ptr, tokens_ptr, wanted_ptr, logprobs_ptr, ranks_ptr, top_ptr, top_ids_ptr,
    stride, vocabulary, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: [tokens]. top_ptr, top_ids_ptr: [tokens, most], of which ``wanted`` of each token are written."""
    which = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + which).to(tl.int64) * stride
    own = tl.load(row_ptr + tl.maximum(tl.load(tokens_ptr + which), 0))

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(row_ptr + at, at < vocabulary, other=float("-inf")))
    best = tl.max(highest)
    weights, above = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, at < vocabulary, other=float("-inf"))
        weights += tl.exp(x - best)
        above += tl.where(x > own, 1, 0)
    whole = best + tl.log(tl.sum(weights))
    tl.store(logprobs_ptr + which, own - whole)
    tl.store(ranks_ptr + which, (tl.sum(above) + 1).to(tl.int64))

    value, token = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for place in range(tl.load(wanted_ptr + which).to(tl.int32)):
        values, places = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32) + vocabulary
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + at, at < vocabulary, other=float("-inf"))
            is_behind = (at < vocabulary) & ((x < value) | ((x == value) & (at > token)))
            is_better = is_behind & ((x > values) | (places == vocabulary))
            values, places = tl.where(is_better, x, values), tl.where(is_better, at, places)
        value = tl.max(values)
        token = tl.min(tl.where(values == value, places, vocabulary))
        tl.store(top_ptr + which * most + place, value - whole)
        tl.store(top_ids_ptr + which * most + place, token.to(tl.int64))
