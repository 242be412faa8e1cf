"""``untorch::paged_prefill`` and ``paged_prefill_decode``: a step attends over a paged KV cache, by kernels for sm_90.

Prompts are a WGMMA kernel's; paged_prefill_decode serves sequences of few tokens, too, by a second kernel, and clears
the rows behind the last sequence. Both are parts of ``untorch::paged_attention_triton``, whose other kernels write new
keys and values, and do what they do not. libuntorch.so has the kernels; there is no other implementation: attention of
CPUs has its own reference (``untorch::paged_attention``).
"""

from __future__ import annotations

from typing import Any

import torch

from untorch.ops import native

__all__ = ["C_SHIMS", "decodes", "is_served", "paged_prefill", "paged_prefill_decode"]

_DECODE_WIDTHS, _DECODE_GROUP = (64, 128), 8

_MAX_WIDTH = 256
_WIDTH_STEP = 8
# Few tiles of narrow heads: µs of 4096 tokens, 64 heads of 64 over 8, with windows of 128, 256 and 512 on an H200: 80,
# 102 and 138, and 78, 106 and 157 by Triton's kernel.
_NARROW, _SHORT_WINDOW = 64, 128

_C_SHIM = (
    "AOTITorchError aoti_torch_cuda_{function}(AtenTensorHandle q, AtenTensorHandle pool, "
    "AtenTensorHandle block_table, AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k, "
    "AtenTensorHandle* sinks, AtenTensorHandle offset, int64_t block, int64_t heads_kv, double scale, int64_t window, "
    "int64_t chunk, int64_t few, {more}AtenTensorHandle* ret0)"
)


def is_served(
    capability: int,
    dtype: torch.dtype,
    pool: torch.Tensor,
    offset: int,
    width: int,
    width_v: int,
    scale: float,
    *,
    window: int,
    alibi: bool,
    softcap: float,
) -> bool:
    """Whether the kernel takes such a layer on a GPU of that compute capability (90), and is faster than Triton's."""
    if width <= _NARROW and 0 < window <= _SHORT_WINDOW:
        return False
    return (
        capability == 90
        and dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == dtype
        and width == width_v
        and width <= _MAX_WIDTH
        and width % _WIDTH_STEP == 0
        and offset % width == 0
        and pool.stride(0) % width == 0
        and scale > 0
        and not alibi
        and not softcap
    )


def decodes(width: int, group: int) -> bool:
    """Whether paged_prefill_decode takes layers that paged_prefill takes. group: heads of q for each KV head."""
    return width in _DECODE_WIDTHS and group <= _DECODE_GROUP


@torch.library.custom_op("untorch::paged_prefill", mutates_args=())
def paged_prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    sinks: torch.Tensor | None,
    offset: torch.Tensor,
    block: int,
    heads_kv: int,
    scale: float,
    window: int,
    chunk: int,
    few: int,
) -> torch.Tensor:
    """[tokens, heads, width] in q's dtype: the rows of sequences of more than ``few`` tokens, others are not written.

    Arguments are those of ``untorch::paged_attention``, tensors contiguous. q: bfloat16 or float16, of a width that is
    a multiple of 8, at most 256; values have the same width. pool: of q's dtype, with blocks of a multiple of it.
    offset: int64, one element on the GPU, a multiple of the width. With no more tokens than sequences nothing is
    written.

    Raises RuntimeError on any GPU but those of compute capability 9.0, and where untorch was built without CUDA.
    """
    others = (block, heads_kv, scale, window, chunk, few)
    return _called("paged_prefill", q, pool, block_table, cu_seqlens_q, seqlens_k, sinks, offset, *others)


@torch.library.custom_op("untorch::paged_prefill_decode", mutates_args=())
def paged_prefill_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    sinks: torch.Tensor | None,
    offset: torch.Tensor,
    block: int,
    heads_kv: int,
    scale: float,
    window: int,
    chunk: int,
    few: int,
    decoded: int,
) -> torch.Tensor:
    """As paged_prefill, with all rows: those of the other sequences, too, and zeros behind the last one.

    Widths of 64 and 128, and at most 8 heads of q for each KV head (``decodes``). With no more tokens than sequences
    all tokens are decoded. decoded: 0: only what paged_prefill does.
    """
    others = (block, heads_kv, scale, window, chunk, few, decoded)
    return _called("paged_prefill_decode", q, pool, block_table, cu_seqlens_q, seqlens_k, sinks, offset, *others)


def _called(function: str, q: torch.Tensor, *arguments: Any) -> torch.Tensor:
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    if not native.serves(function, q):
        raise RuntimeError(f"{function}: expected an untorch that was built with CUDA")
    before, sinks, behind = arguments[:4], arguments[4], arguments[5:]
    native.call(function, out, q, *before, (sinks,), *behind)
    return out


@paged_prefill_decode.register_fake
@paged_prefill.register_fake
def _paged_prefill_fake(q: torch.Tensor, *_others: object) -> torch.Tensor:
    return q.new_empty(q.shape)


C_SHIMS = {
    torch.ops.untorch.paged_prefill.default: [_C_SHIM.format(function="paged_prefill", more="")],
    torch.ops.untorch.paged_prefill_decode.default: [
        _C_SHIM.format(function="paged_prefill_decode", more="int64_t decoded, ")
    ],
}
