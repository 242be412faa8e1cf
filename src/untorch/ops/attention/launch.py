"""Launches the attention kernels: grids, block sizes and strides from tensors whose sizes may be symbols.

Nothing here asks for the value of a size that may vary, as that would tie a compiled model to it: what is known when
the model is compiled becomes a constant of the kernel, the rest is passed to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.attention.configs import (
    DecodeConfig,
    PrefillConfig,
    block_width,
    decode_config,
    decode_rows,
    few_queries,
    prefill_config,
)
from untorch.ops.attention.decode import combine, decode
from untorch.ops.attention.prefill import prefill

__all__ = ["launch", "launch_decode", "launch_prefill", "uses_decode"]

Wrap = Callable[[Any], Any]

# Of numbers or symbols.
_max: Callable[[Any, Any], Any] = torch.sym_max
_min: Callable[[Any, Any], Any] = torch.sym_min

_LOG2_E = 1.4426950408889634
# So much of keys and values may be in use by programs that run together: less than half of the L2 cache.
_CACHED_BYTES = 16 << 20
_COMBINE_BLOCK = 32
# Splitting keys pays for fewer rows than these, and for more of them from so many keys a row on.
_FEW_DECODE_ROWS, _DECODE_KEYS = 16, 8
_MOST_ALIGNED = 16  # elements


def uses_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Whether the queries are known to be few enough for the kernel that splits the keys, and the keys may be many."""
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if causal or not _known(rows <= decode_rows(q.element_size(), _widest(q, v))):
        return False
    return _known(rows < _FEW_DECODE_ROWS) or not _known(k.shape[2] <= _DECODE_KEYS * rows)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    wrap: Wrap,
) -> torch.Tensor:
    """``untorch::attention`` on a GPU; ``wrap`` makes a kernel traceable."""
    major, minor = torch.cuda.get_device_capability(q.device)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    width = _widest(q, v)
    if uses_decode(q, k, v, causal):
        decoding = decode_config(10 * major + minor, q.element_size(), width)
        return launch_decode(q, k, v, mask, scale, decoding, processors, wrap)
    few = _known(few_queries(q.shape[0] * q.shape[1], q.shape[2], processors))
    config = prefill_config(10 * major + minor, q.element_size(), width, causal, few)
    return launch_prefill(q, k, v, mask, causal, scale, config, wrap)


def launch_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    config: PrefillConfig,
    wrap: Wrap,
) -> torch.Tensor:
    """Many queries: one program for each block of them."""
    q, k, v = (_with_rows(t) for t in (q, k, v))
    batch, heads, queries, width = q.shape
    heads_kv, keys, width_v = k.shape[1], k.shape[2], v.shape[3]
    out = _empty_result(q, v)
    factor, negate = _scale(scale, width)
    pairs = batch * heads
    blocks = (queries + config.block_m - 1) // config.block_m
    together = _CACHED_BYTES // _max(1, keys * (width + width_v) * q.element_size())
    together = _max(1, _min(pairs, together))
    kind, mask_tensor, mask_strides = _mask(mask, q)
    wrap(prefill)[(pairs * blocks,)](
        q, k, v, mask_tensor, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides, *_result_strides(out),
        heads, heads // heads_kv, pairs, together, queries, keys,
        SCALE=factor, NEGATE=negate, WIDTH=int(width), WIDTH_V=int(width_v),
        BLOCK_D=block_width(int(width)), BLOCK_DV=block_width(int(width_v)),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        MASK=kind, CAUSAL=causal, EVEN=_known(keys % config.block_n == 0), ALIGN=_alignment(q, k, v),
        PRECISE=q.dtype == torch.float32,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out.transpose(1, 2)


def launch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    config: DecodeConfig,
    processors: int,
    wrap: Wrap,
) -> torch.Tensor:
    """Decode: the keys are split among as many programs as one wave of the GPU's ``processors`` has."""
    q, k, v = (_with_rows(t) for t in (q, k, v))
    batch, heads, queries, width = q.shape
    heads_kv, keys, width_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads // heads_kv
    pairs, rows = batch * heads_kv, group * queries
    block_m = next(size for size in (16, 32, 64) if _known(rows <= size))
    out = _empty_result(q, v)
    factor, negate = _scale(scale, width)
    blocks = (keys + config.block_n - 1) // config.block_n
    splits = _max(1, _min(blocks, config.programs * processors // _max(1, pairs)))
    single = _known(splits == 1)
    # A tensor that a kernel does not touch must not be one that it writes: torch would make it a copy.
    parts, peaks, totals = q, q, q
    if not single:
        count = pairs * splits * rows
        parts = q.new_empty((count * width_v,), dtype=torch.float32)
        peaks = q.new_empty((count,), dtype=torch.float32)
        totals = q.new_empty((count,), dtype=torch.float32)
    kind, mask_tensor, mask_strides = _mask(mask, q)
    wrap(decode)[(pairs * splits,)](
        q, k, v, mask_tensor, out if single else q, parts, peaks, totals,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides, *_result_strides(out),
        heads_kv, group, queries, keys, splits,
        SCALE=factor, NEGATE=negate, WIDTH=int(width), WIDTH_V=int(width_v),
        BLOCK_D=block_width(int(width)), BLOCK_DV=block_width(int(width_v)), BLOCK_M=block_m, BLOCK_N=config.block_n,
        MASK=kind, SINGLE=single, EVEN=_known(keys % config.block_n == 0), ALIGN=_alignment(k, v),
        PRECISE=q.dtype == torch.float32,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if not single:
        wrap(combine)[(pairs * rows,)](
            out, parts, peaks, totals, *_result_strides(out), heads_kv, group, queries, splits,
            WIDTH_V=int(width_v), BLOCK_DV=block_width(int(width_v)), BLOCK_S=_COMBINE_BLOCK,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out.transpose(1, 2)


def _known(condition: Any) -> bool:
    """Whether the condition holds for all sizes that the model may be called with."""
    return bool(statically_known_true(condition))


def _widest(q: torch.Tensor, v: torch.Tensor) -> int:
    return block_width(max(int(q.shape[3]), int(v.shape[3])))


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if a row of it lies together in memory, or a copy."""
    return tensor if _known(tensor.stride(3) == 1) or _known(tensor.shape[3] == 1) else tensor.contiguous()


def _empty_result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[batch, queries, heads, width_v], contiguous: what the layer behind wants is then a view."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _result_strides(out: torch.Tensor) -> tuple[Any, Any, Any]:
    """Of batch, head and query."""
    return out.stride(0), out.stride(2), out.stride(1)


def _scale(scale: float | None, width: int) -> tuple[float, bool]:
    """The scale for powers of two, above zero, and whether queries change their sign for it."""
    value = (1 / math.sqrt(width) if scale is None else float(scale)) * _LOG2_E
    return max(abs(value), 1e-30), value < 0


def _mask(mask: torch.Tensor | None, q: torch.Tensor) -> tuple[int, torch.Tensor, list[Any]]:
    """What the kernels call MASK, a tensor, and its strides by batch, head, query and key; 0 where it is repeated."""
    if mask is None:
        return 0, q, [0, 0, 0, 0]
    strides: list[Any] = [0] * (4 - mask.dim())
    for size, stride in zip(mask.shape, mask.stride(), strict=True):
        strides.append(0 if _known(size == 1) else stride)
    return 1 if mask.dtype == torch.bool else 2, mask, strides


def _alignment(*tensors: torch.Tensor) -> int:
    """The power of two, at most _MOST_ALIGNED, that is known to divide all strides."""
    found = _MOST_ALIGNED
    while not all(_known(stride % found == 0) for tensor in tensors for stride in tensor.stride()[:3]):
        found //= 2
    return found
