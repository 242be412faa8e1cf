"""``untorch::paged_attention_triton``: untorch::paged_attention by Triton kernels that are compiled into the model.

The pass paged_attention_kernels puts it into graphs for CUDA. AOTInductor then compiles the kernels with the model, and
passes the pool straight in. On the CPU there is the reference alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

from untorch.ops.paged_attention import check_arguments, paged_attention

__all__ = ["OPERATOR", "paged_attention_triton"]


def _paged_attention_triton(
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
    offset: torch.Tensor,
    aligned: bool,
    wgmma: bool,
    block: int,
    heads_kv: int,
    width: int,
    width_v: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> torch.Tensor:
    """As ``untorch::paged_attention``, but that a slot or a page out of range is not an error: see ops/attention/paged.

    Widths to 576 for keys and 512 for values, 256 in float32. offset is a tensor of one int64, so that layers share
    their kernels: Inductor compiles one for each number that is passed. aligned: it is a multiple of 16.
    wgmma: sequences of many tokens are ``untorch::paged_prefill``'s, in the place of Triton's kernel.
    """
    from untorch.ops.attention.paged_launch import launch_paged

    _check(aligned, q, k, v, pool, block_table, block, heads_kv, width, width_v)
    return launch_paged(
        q, k, v, pool, block_table, cu_seqlens_q, seqlens_k, slot_mapping, sinks, alibi, offset, aligned, wgmma,
        block, heads_kv, width, width_v, scale, window, chunk, softcap, torch.library.wrap_triton,
    )  # fmt: skip


paged_attention_triton = cast(
    CustomOpDef,
    torch.library.triton_op("untorch::paged_attention_triton", _paged_attention_triton, mutates_args=("pool",)),
)


@paged_attention_triton.register_kernel("cpu")
def _paged_attention_cpu(*args: Any) -> torch.Tensor:
    before, (offset, _aligned, _wgmma), behind = args[:10], args[10:13], args[13:]
    result: torch.Tensor = paged_attention(*before, int(offset), *behind)
    return result


@paged_attention_triton.register_fake
def _paged_attention_fake(q: torch.Tensor, *others: Any) -> torch.Tensor:
    (k, v, pool, block_table), aligned, (block, heads_kv, width, width_v) = others[:4], others[10], others[12:16]
    _check(aligned, q, k, v, pool, block_table, block, heads_kv, width, width_v)
    return q.new_empty((q.shape[0], q.shape[1], width_v))


def _check(aligned: bool, q: Any, k: Any, v: Any, pool: Any, block_table: Any, *sizes: int) -> None:
    """The offset is a tensor: what is known of it is whether it is aligned."""
    check_arguments(q, k, v, pool, block_table, 0 if aligned else 1, *sizes)


OPERATOR = torch.ops.untorch.paged_attention_triton.default
