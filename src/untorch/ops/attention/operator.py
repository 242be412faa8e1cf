"""``untorch::attention``: scaled dot-product attention by kernels that are compiled into the model.

AOTInductor compiles the Triton kernels with the model, so it needs no function of the runtime for it. On the CPU there
is the reference alone.
"""

from __future__ import annotations

from typing import cast

import torch
from torch._library.custom_ops import CustomOpDef

from untorch.ops.attention.reference import attention_reference

__all__ = ["DTYPES", "MAX_WIDTH", "OPERATOR", "attention"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 256


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """softmax(q · kᵀ · scale + mask) · v, in float32 inside; [batch, heads, queries, width_v].

    q [batch, heads, queries, width], k [batch, heads_kv, keys, width], v [batch, heads_kv, keys, width_v], where heads
    is a multiple of heads_kv and query head h reads key head h // (heads / heads_kv). float16, bfloat16 or float32; any
    strides, but a last dimension that is not contiguous is copied. Widths up to 256.

    mask: bool (true: visible) or additive, broadcastable to [batch, heads, queries, keys]. causal: query i sees keys 0
    to i. scale: 1 / √width if None. A query that sees no key gives zeros.

    The result is contiguous as [batch, queries, heads, width_v] and returned with heads and queries transposed: what
    follows in a model, transpose(1, 2).reshape(batch, queries, heads · width_v), is then a view.
    """
    from untorch.ops.attention.launch import launch

    _check(q, k, v, mask)
    return launch(q, k, v, mask, causal, scale, torch.library.wrap_triton)


attention = cast(CustomOpDef, torch.library.triton_op("untorch::attention", _attention, mutates_args=()))


@attention.register_kernel("cpu")
def _attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    _check(q, k, v, mask)
    return (
        attention_reference(q, k, v, mask, causal, scale)
        .transpose(1, 2)
        .clone(memory_format=torch.contiguous_format)
        .transpose(1, 2)
    )


@attention.register_fake
def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    _check(q, k, v, mask)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"attention: {name}: expected 4 dimensions, got {tensor.dim()}")
        if tensor.dtype != q.dtype or tensor.dtype not in DTYPES:
            raise ValueError(
                f"attention: {name}: expected float16, bfloat16 or float32, the same as q, got {tensor.dtype}"
            )
        if not 1 <= tensor.shape[3] <= MAX_WIDTH:
            raise ValueError(f"attention: {name}: expected a width of 1 to {MAX_WIDTH}, got {tensor.shape[3]}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"attention: k: expected a number of heads that divides {q.shape[1]}, got {k.shape[1]}")
    if mask is not None and mask.dim() > 4:
        raise ValueError(f"attention: mask: expected at most 4 dimensions, got {mask.dim()}")


OPERATOR = torch.ops.untorch.attention.default
