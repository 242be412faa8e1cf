"""``untorch::choose_tokens``: the kernel as an operator, and its reference.

AOTInductor compiles the kernel with the model that calls it. On the CPU there is the reference alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

__all__ = ["OPERATOR", "choose_tokens", "launch_choose"]

_BLOCK, _WARPS = 4096, 8


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


OPERATOR = torch.ops.untorch.choose_tokens.default
