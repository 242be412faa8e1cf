"""``untorch::rope_cache_triton``: norms of q and k, rotary embedding and the write of pages by one Triton kernel.

The pass fuse_rope_cache puts it before paged attention in graphs for CUDA. AOTInductor compiles the kernel with the
model. On the CPU there is the reference alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.kv_pages import LARGEST_CODE, Pages

__all__ = ["OPERATOR", "launch_rope_cache", "rope_cache_triton", "rotated"]

_TILE = 2048  # elements that a program has of a head


def rotated(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float, interleaved: bool
) -> torch.Tensor:
    """Heads [tokens, heads, width], normalised by their RMS if there is a weight [width], and rotated, in x's dtype.

    cos, sin: [tokens, rotary]. The first rotary elements turn: with their neighbour if interleaved, else with that half
    of them away. Computed in float32, or float64 for that.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    rotary = cos.shape[-1]
    turned, rest = y[..., :rotary], y[..., rotary:]
    if interleaved:
        partner = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    else:
        partner = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), -1)
    turned = turned * cos.to(wide)[:, None] + partner * sin.to(wide)[:, None]
    return torch.cat((turned, rest), -1).to(x.dtype)


def _rope_cache_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    offset: torch.Tensor,
    aligned: bool,
    block: int,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """q [tokens, heads, width] as ``rotated`` gives it, contiguous; k likewise, and v, go to their slots of the pool.

    q [tokens, heads, width], k [tokens, heads_kv, width], v [tokens, heads_kv, width_v]: the last dimension contiguous.
    q_weight, k_weight: [width], or None for no norm. cos, sin: [tokens, rotary], rotary even and at most the width, or
        with more dimensions of 1 before.
    pool, slot_mapping, block: as for ``untorch::paged_attention``; offset and aligned as for
    ``untorch::paged_attention_triton``. A slot that is negative or out of range is written nowhere.
    """
    _check(q, k, v, q_weight, k_weight, cos, sin)
    return launch_rope_cache(
        q, k, v, q_weight, k_weight, cos, sin, pool, slot_mapping, offset, aligned, block, eps, interleaved,
        torch.library.wrap_triton,
    )  # fmt: skip


def launch_rope_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    offset: torch.Tensor,
    aligned: bool,
    block: int,
    eps: float,
    interleaved: bool,
    wrap: Callable[[Any], Any],
) -> torch.Tensor:
    """The operator on a GPU; ``wrap`` makes the kernel traceable. The grid comes from shapes, which may be symbols."""
    from untorch.ops.attention.configs import block_width
    from untorch.ops.attention.rope_cache import rope_cache

    tokens, heads, width = q.shape[0], int(q.shape[1]), int(q.shape[2])
    heads_kv, width_v = int(v.shape[1]), int(v.shape[2])
    q, k, v, cos, sin = (_with_rows(x) for x in (q, k, v, cos, sin))
    block_d, block_dv = block_width(width), block_width(width_v)
    block_t = max(1, _TILE // max(block_d, block_dv))
    out = q.new_empty((tokens, heads, width))
    wrap(rope_cache)[((tokens + block_t - 1) // block_t * (heads + heads_kv),)](
        q, k, v, q if q_weight is None else q_weight.contiguous(), q if k_weight is None else k_weight.contiguous(),
        cos, sin, pool, slot_mapping.contiguous(), offset, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(-2), sin.stride(-2), pool.stride(0),
        tokens, pool.shape[0],
        HEADS=heads, HEADS_KV=heads_kv, BLOCK=block, WIDTH=width, WIDTH_V=width_v, ROTARY=int(cos.shape[-1]),
        INTERLEAVED=interleaved, NORM_Q=q_weight is not None, NORM_K=k_weight is not None, EPS=float(eps),
        BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_T=block_t, ALIGNED=aligned and _are_aligned(q, k, v, pool),
        LARGEST=LARGEST_CODE.get(pool.dtype, 0.0),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


rope_cache_triton = cast(
    CustomOpDef, torch.library.triton_op("untorch::rope_cache_triton", _rope_cache_triton, mutates_args=("pool",))
)


@rope_cache_triton.register_kernel("cpu")
def _rope_cache_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    offset: torch.Tensor,
    aligned: bool,
    block: int,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    _check(q, k, v, q_weight, k_weight, cos, sin)
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in (cos, sin))
    keys = rotated(k, k_weight, cos, sin, eps, interleaved)
    kept = (slot_mapping >= 0) & (slot_mapping < pool.shape[0] * block)
    slots = slot_mapping[kept]
    pages = Pages(pool, int(offset), block, k.shape[1], k.shape[2], v.shape[2])
    pages.write(slots // block, slots % block, keys[kept], v[kept])
    return rotated(q, q_weight, cos, sin, eps, interleaved).contiguous()


@rope_cache_triton.register_fake
def _rope_cache_fake(q: torch.Tensor, *others: Any) -> torch.Tensor:
    _check(q, *others[:6])
    return q.new_empty(q.shape)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Raises ValueError for shapes and dtypes that do not fit together."""
    if any(x.dim() != 3 or x.dtype != q.dtype for x in (q, k, v)) or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"rope_cache: expected q [tokens, heads, width], k [tokens, heads_kv, width] and v [tokens, heads_kv, "
            f"width_v] of one dtype, got {q.dtype} {tuple(q.shape)}, {k.dtype} {tuple(k.shape)} and {v.dtype} "
            f"{tuple(v.shape)}"
        )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"rope_cache: expected as many heads in v as the {k.shape[1]} of k, got {v.shape[1]}")
    width = q.shape[2]
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and tuple(weight.shape) != (width,):
            raise ValueError(f"rope_cache: {name}: expected [{width}], got {tuple(weight.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        is_table = table.dim() >= 2 and all(isinstance(size, int) and size == 1 for size in table.shape[:-2])
        if not is_table or table.shape[-1] % 2 or not 0 < table.shape[-1] <= width or table.shape[-1] != cos.shape[-1]:
            raise ValueError(
                f"rope_cache: {name}: expected [tokens, rotary] with an even number to {width}, for both the same, got "
                f"{tuple(table.shape)}"
            )


def _known(condition: Any) -> bool:
    return bool(statically_known_true(condition))


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if its last dimension lies together in memory, or a copy."""
    return tensor if _known(tensor.stride(-1) == 1) or _known(tensor.shape[-1] == 1) else tensor.contiguous()


def _are_aligned(*tensors: torch.Tensor) -> bool:
    return all(_known(stride % 16 == 0) for tensor in tensors for stride in tensor.stride()[:-1])


OPERATOR = torch.ops.untorch.rope_cache_triton.default
