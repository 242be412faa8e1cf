"""``untorch::choose_tokens`` and ``untorch::token_logprobs``: the kernels as operators, and their references.

AOTInductor compiles a kernel with the model that calls it. On the CPU there is the reference alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

__all__ = [
    "LOGPROBS", "MOST_LOGPROBS", "OPERATOR", "choose_tokens", "launch_choose", "launch_logprobs", "token_logprobs",
]  # fmt: skip

MOST_LOGPROBS = 20  # of a token; what OpenAI's API allows
_BLOCK, _WARPS = 4096, 8

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _choose_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """A token id for each of ``rows`` of the logits [any, at least vocabulary], float32; -1 where there is none.

    All others have one element a token. rows, top_k int64; the rest float32. temperature 0: the most likely token.
    top_k 0, top_p 1, min_p 0: all tokens. uniform: a random number from 0 up to 1.
    """
    return launch_choose(logits, rows, temperature, top_k, top_p, min_p, uniform, vocabulary, torch.library.wrap_triton)


choose_tokens = cast(
    CustomOpDef, torch.library.triton_op("untorch::choose_tokens", _choose_tokens, mutates_args=())
)  # fmt: skip


def launch_choose(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    vocabulary: int,
    wrap: Any,
    block: int = _BLOCK,
) -> torch.Tensor:
    """Launches the kernel; ``wrap`` makes it traceable. block: a power of two."""
    from untorch.ops.sampling.choose import choose_tokens as kernel

    tokens = rows.new_empty(rows.shape[0])
    wrap(kernel)[(rows.shape[0],)](
        logits, rows, temperature, top_k, top_p, min_p, uniform, tokens, logits.stride(0), vocabulary,
        BLOCK=block, num_warps=_WARPS, num_stages=1,
    )  # fmt: skip
    return tokens


@choose_tokens.register_kernel("cpu")
def _choose_tokens_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    tokens = torch.full_like(rows, -1)
    for i, row in enumerate(rows.tolist()):
        x = logits[row, :vocabulary].double()
        if not bool(x.lt(torch.inf).all()) or not bool(x.isfinite().any()):
            continue
        if temperature[i] == 0:
            tokens[i] = x.argmax()
            continue
        weights = torch.exp((x - x.max()) / temperature[i].double())
        weights = torch.where(weights >= min_p[i], weights, 0.0)
        order = torch.argsort(x, descending=True, stable=True)
        kept = weights[order]
        if top_k[i] > 0:
            kept[int(top_k[i]) :] = 0
        if top_p[i] < 1:
            kept[kept.cumsum(0) - kept >= top_p[i] * kept.sum()] = 0
        weights[order] = kept
        running = weights.cumsum(0)
        above = (running > uniform[i].double() * running[-1]) & (weights > 0)
        tokens[i] = int(above.to(torch.int8).argmax()) if bool(above.any()) else int(weights.nonzero()[-1])
    return tokens


@choose_tokens.register_fake
def _choose_tokens_fake(logits: torch.Tensor, rows: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(rows)


def _token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor, vocabulary: int
) -> Logprobs:
    """Logprobs [S] of the tokens in their rows of the logits, ranks [S] from 1 on, and the most likely tokens'
    logprobs and ids [S, MOST_LOGPROBS], of which each has ``wanted``: the rest is 0.

    logits [any, at least vocabulary], float32; rows, tokens, wanted [S], int64. Token -1 counts as 0.
    """
    return launch_logprobs(logits, rows, tokens, wanted, vocabulary, torch.library.wrap_triton)


token_logprobs = cast(
    CustomOpDef, torch.library.triton_op("untorch::token_logprobs", _token_logprobs, mutates_args=())
)  # fmt: skip


def launch_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    vocabulary: int,
    wrap: Any,
    block: int = _BLOCK,
) -> Logprobs:
    """Launches the kernel, as ``launch_choose``."""
    from untorch.ops.sampling.logprobs import token_logprobs as kernel

    count = rows.shape[0]
    logprobs, ranks = logits.new_empty(count), rows.new_empty(count)
    top, top_ids = logits.new_zeros(count, MOST_LOGPROBS), rows.new_zeros(count, MOST_LOGPROBS)
    wrap(kernel)[(count,)](
        logits, rows, tokens, wanted, logprobs, ranks, top, top_ids, logits.stride(0), vocabulary, MOST_LOGPROBS,
        BLOCK=block, num_warps=_WARPS, num_stages=1,
    )  # fmt: skip
    return logprobs, ranks, top, top_ids


@token_logprobs.register_kernel("cpu")
def _token_logprobs_cpu(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor, vocabulary: int
) -> Logprobs:
    x = logits[rows, :vocabulary].double()
    whole = x.logsumexp(1, keepdim=True)
    own = x.gather(1, tokens.clamp(min=0)[:, None])
    order = torch.argsort(x, dim=1, descending=True, stable=True)[:, :MOST_LOGPROBS]
    order = torch.nn.functional.pad(order, (0, MOST_LOGPROBS - order.shape[1]))
    absent = torch.arange(MOST_LOGPROBS) >= wanted[:, None]
    top = (x.gather(1, order) - whole).masked_fill(absent, 0)
    return (own - whole)[:, 0].float(), (x > own).sum(1) + 1, top.float(), order.masked_fill(absent, 0)


@token_logprobs.register_fake
def _token_logprobs_fake(logits: torch.Tensor, rows: torch.Tensor, *others: Any) -> Logprobs:
    shape = rows.shape[0], MOST_LOGPROBS
    return logits.new_empty(shape[0]), torch.empty_like(rows), logits.new_empty(shape), rows.new_empty(shape)


OPERATOR = torch.ops.untorch.choose_tokens.default
LOGPROBS = torch.ops.untorch.token_logprobs.default
