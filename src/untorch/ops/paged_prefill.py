"""``untorch::paged_prefill``: the prompts of a step attend over a paged KV cache, by a WGMMA kernel for sm_90.

It is a part of ``untorch::paged_attention_triton``, whose other kernels write new keys and values, serve sequences of
few tokens, and clear the rows behind the last sequence. libuntorch.so has the kernel; there is no other
implementation: attention of CPUs has its own reference (``untorch::paged_attention``).
"""

from __future__ import annotations

import torch

from untorch.ops import native

__all__ = ["C_SHIM", "OPERATOR", "is_served", "paged_prefill"]

_MAX_WIDTH = 256
_WIDTH_STEP = 8
# Few tiles of narrow heads: µs of 4096 tokens, 64 heads of 64 over 8, with windows of 128, 256 and 512 on an H200: 80,
# 102 and 138, and 78, 106 and 157 by Triton's kernel.
_NARROW, _SHORT_WINDOW = 64, 128

C_SHIM = (
    "AOTITorchError aoti_torch_cuda_paged_prefill(AtenTensorHandle q, AtenTensorHandle pool, "
    "AtenTensorHandle block_table, AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k, "
    "AtenTensorHandle* sinks, AtenTensorHandle offset, int64_t block, int64_t heads_kv, double scale, int64_t window, "
    "int64_t chunk, int64_t few, AtenTensorHandle* ret0)"
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
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    if not native.serves("paged_prefill", q):
        raise RuntimeError("paged_prefill: expected an untorch that was built with CUDA")
    native.call(
        "paged_prefill", out, q, pool, block_table, cu_seqlens_q, seqlens_k, (sinks,), offset, block, heads_kv, scale,
        window, chunk, few,
    )  # fmt: skip
    return out


@paged_prefill.register_fake
def _paged_prefill_fake(q: torch.Tensor, *_others: object) -> torch.Tensor:
    return q.new_empty(q.shape)


OPERATOR = torch.ops.untorch.paged_prefill.default
