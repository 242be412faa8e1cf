"""Launches the paged attention kernels. Grids come from shapes, which may be symbols, and never from values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.attention.configs import block_width
from untorch.ops.attention.paged import paged_combine, paged_decode, paged_prefill, write_pages
from untorch.ops.attention.paged_configs import BUSY, PagedConfig, paged_config, split_width
from untorch.ops.kv_pages import LARGEST_CODE
from untorch.ops.paged_prefill import decodes, paged_prefill_decode
from untorch.ops.paged_prefill import paged_prefill as paged_prefill_wgmma

__all__ = ["launch_paged"]

Wrap = Callable[[Any], Any]

# Of numbers or symbols.
_max: Callable[[Any, Any], Any] = torch.sym_max
_min: Callable[[Any, Any], Any] = torch.sym_min

_MOST_SPLITS = 128
_COMBINE_BLOCK = 32
# Of values in prefill: with fewer, rows of less than 128 bytes, Triton's code for sm_90 reads beyond shared memory.
_FEWEST_COLUMNS = 64
_WRITE_ELEMENTS = 4096  # of a tile of tokens
# Where paged_prefill_decode decodes: while clusters of so many CTAs are one wave of the GPU, and the block table has
# room for no more positions. ms a token, Qwen3-8B's sizes in int4 on an H200, by Triton's kernels and by it, with 128,
# 4,096 and 32,768 positions: 2.066, 2.347 and 3.910; 1.910, 2.277 and 4.685. More sequences were not measured.
_CLUSTER, _MOST_POSITIONS = 8, 8192


def launch_paged(
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
    wrap: Wrap,
    config: PagedConfig | None = None,
    processors: int | None = None,
) -> torch.Tensor:
    """``untorch::paged_attention`` on a GPU; ``wrap`` makes a kernel traceable.

    offset: int64, one element on the GPU. aligned: whether it is a multiple of 16. wgmma: whether sequences of many
    tokens are ``untorch::paged_prefill``'s.
    config, processors: None for those of q's GPU.
    """
    tokens, heads = q.shape[0], int(q.shape[1])
    sequences, group = seqlens_k.shape[0], heads // heads_kv
    if config is None:
        major, minor = torch.cuda.get_device_capability(q.device)
        config = paged_config(
            10 * major + minor, q.element_size(), width, width_v, group, fp8=pool.dtype == torch.float8_e4m3fn
        )
    if processors is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    # Read by two kernels: what computes it is then not repeated for each of them.
    q = q.contiguous()
    cu_seqlens_q, seqlens_k, block_table = (x.contiguous() for x in (cu_seqlens_q, seqlens_k, block_table))
    block_d, block_rest = split_width(width)
    block_dv = block_width(width_v)
    largest = LARGEST_CODE.get(pool.dtype, 0.0)
    if k is not None and v is not None:
        k, v = _with_rows(k), _with_rows(v)
        lanes = block_width(width)
        block_t = max(1, _WRITE_ELEMENTS // max(lanes, block_dv))
        wrap(write_pages)[((tokens + block_t - 1) // block_t * heads_kv,)](
            k, v, pool, slot_mapping.contiguous(), offset, *k.stride()[:2], *v.stride()[:2], pool.stride(0),
            tokens, pool.shape[0],
            HEADS_KV=heads_kv, BLOCK=block, WIDTH=width, WIDTH_V=width_v, BLOCK_D=lanes, BLOCK_DV=block_dv,
            BLOCK_T=block_t, ALIGNED=aligned and _are_aligned(k, v, pool), LARGEST=largest,
            num_warps=4, num_stages=1,
        )  # fmt: skip

    few_heads = min(group, config.rows)
    few = config.rows // few_heads
    out: torch.Tensor
    decoded = 0
    if wgmma:
        native = (
            q, pool, block_table, cu_seqlens_q, seqlens_k, None if sinks is None else sinks.contiguous(), offset, block,
            heads_kv, float(scale), window, chunk,
        )  # fmt: skip
        if decodes(width, group):
            many = sequences * (heads_kv * _CLUSTER) // (processors + 1)
            decoded = 1 - _min(1, many + (block_table.shape[1] * block - 1) // _MOST_POSITIONS)
            out = paged_prefill_decode(*native, few, decoded)
        else:
            out = paged_prefill_wgmma(*native, few)
    else:
        out = q.new_empty((tokens, heads, width_v))
    tiles = -(-group // few_heads)
    # As many programs as one wave of the GPU has.
    more = config.busy_programs - config.decode.programs
    programs = config.decode.programs + more * _min(1, sequences // BUSY)
    splits = _max(1, _min(_MOST_SPLITS, programs * processors // (_max(1, sequences) * heads_kv * tiles)))
    several = _min(splits - 1, 1)  # 0 with one split: nothing to reduce
    several *= 1 - decoded
    rows = sequences * few * heads * splits * several
    parts = q.new_empty((rows * width_v,), dtype=torch.float32)
    peaks = q.new_empty((rows,), dtype=torch.float32)
    totals = q.new_empty((rows,), dtype=torch.float32)
    common = {
        "SCALE": float(scale), "SOFTCAP": float(softcap), "WINDOW": window, "CHUNK": chunk,
        "SINKS": sinks is not None, "ALIBI": alibi is not None, "HEADS_KV": heads_kv, "GROUP": group,
        "BLOCK": block, "WIDTH": width, "WIDTH_V": width_v,
        "BLOCK_D": block_d, "BLOCK_REST": block_rest, "BLOCK_DV": block_dv,
        "ALIGNED": aligned and _are_aligned(q, pool), "PRECISE": q.dtype == torch.float32,
        "LARGEST": largest,
    }  # fmt: skip
    nothing = seqlens_k  # stands for a tensor that is not there
    read = (
        q, pool, block_table, cu_seqlens_q, seqlens_k, offset,
        nothing if sinks is None else sinks.contiguous(), nothing if alibi is None else alibi.contiguous(),
    )  # fmt: skip
    numbers = (
        *q.stride()[:2], pool.stride(0), tokens, sequences, block_table.shape[1], pool.shape[0],
    )  # fmt: skip
    wrap(paged_decode)[((sequences + 1) * (heads_kv * tiles) * splits * (1 - decoded),)](
        *read, out, parts, peaks, totals, *numbers, splits,
        **common, GROUP_TILE=few_heads, BLOCK_M=config.rows, BLOCK_N=config.decode.block_n,
        num_warps=config.decode.num_warps, num_stages=config.decode.num_stages,
    )  # fmt: skip
    wrap(paged_combine)[(sequences * heads * several,)](
        out, parts, peaks, totals, cu_seqlens_q, seqlens_k, tokens, sequences, block_table.shape[1], splits,
        WINDOW=window, CHUNK=chunk, BLOCK=block, BLOCK_N=config.decode.block_n,
        HEADS=heads, BLOCK_Q=few, WIDTH_V=width_v, BLOCK_DV=block_dv, BLOCK_S=_COMBINE_BLOCK,
        num_warps=4, num_stages=1,
    )  # fmt: skip

    if wgmma:
        return out
    prefill = config.prefill
    group_tile = min(group, prefill.block_m)
    queries = tokens // (prefill.block_m // group_tile) + sequences
    # With no more tokens than sequences, decode serves them all.
    is_needed = _max(0, _min(1, tokens - sequences))
    wrap(paged_prefill)[(queries * (heads_kv * -(-group // group_tile)) * is_needed,)](
        *read, out, *numbers, queries,
        **common | {"BLOCK_DV": max(block_dv, _FEWEST_COLUMNS)},
        GROUP_TILE=group_tile, FEW=few, BLOCK_M=prefill.block_m, BLOCK_N=prefill.block_n,
        num_warps=prefill.num_warps, num_stages=prefill.num_stages,
    )  # fmt: skip
    return out


def _known(condition: Any) -> bool:
    """Whether the condition holds for all sizes that the model may be called with."""
    return bool(statically_known_true(condition))


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if a head's row lies together in memory, or a copy."""
    return tensor if _known(tensor.stride(2) == 1) or _known(tensor.shape[2] == 1) else tensor.contiguous()


def _are_aligned(*tensors: torch.Tensor) -> bool:
    return all(_known(stride % 16 == 0) for tensor in tensors for stride in tensor.stride()[:-1])
