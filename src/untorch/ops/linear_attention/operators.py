"""``untorch::causal_conv1d_triton`` and ``untorch::gated_delta_rule_triton``: Triton kernels compiled into the model.

The pass recurrent_kernels puts them into graphs for CUDA. AOTInductor then compiles the kernels with the model, and
passes the state pool straight in. On the CPU there are the references alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

from untorch.ops.causal_conv1d import causal_conv1d, check_conv1d
from untorch.ops.gated_delta_rule import check_delta_rule, gated_delta_rule

__all__ = ["CAUSAL_CONV1D", "GATED_DELTA_RULE", "causal_conv1d_triton", "gated_delta_rule_triton"]


def _causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """As ``untorch::causal_conv1d``, but that a slot out of range is not an error.

    offset is a tensor of one int64, a multiple of 16, so that layers share their kernels.
    """
    from untorch.ops.linear_attention.launch import launch_causal_conv1d

    check_conv1d(x, weight, bias, states, state_slots, cu_seqlens_q, seqlens_k, 0)
    return launch_causal_conv1d(
        x, weight, bias, states, state_slots, cu_seqlens_q, seqlens_k, offset, silu, torch.library.wrap_triton
    )  # fmt: skip


causal_conv1d_triton = cast(
    CustomOpDef, torch.library.triton_op("untorch::causal_conv1d_triton", _causal_conv1d, mutates_args=("states",))
)


@causal_conv1d_triton.register_kernel("cpu")
def _causal_conv1d_cpu(*args: Any) -> torch.Tensor:
    result: torch.Tensor = causal_conv1d(*args[:7], int(args[7]), args[8])
    return result


@causal_conv1d_triton.register_fake
def _causal_conv1d_fake(*args: Any) -> torch.Tensor:
    x, weight, bias, states, state_slots, cu_seqlens_q, seqlens_k = args[:7]
    check_conv1d(x, weight, bias, states, state_slots, cu_seqlens_q, seqlens_k, 0)
    out: torch.Tensor = x.new_empty((x.shape[0], x.shape[1]))
    return out


def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: torch.Tensor,
    l2norm: bool,
    scale: float,
) -> torch.Tensor:
    """As ``untorch::gated_delta_rule``, with keys of at most 512, and ``offset`` as above."""
    from untorch.ops.linear_attention.launch import launch_gated_delta_rule

    check_delta_rule(q, k, v, g, beta, states, state_slots, cu_seqlens_q, seqlens_k, 0)
    return launch_gated_delta_rule(
        q, k, v, g, beta, states, state_slots, cu_seqlens_q, seqlens_k, offset, l2norm, scale,
        torch.library.wrap_triton,
    )  # fmt: skip


gated_delta_rule_triton = cast(
    CustomOpDef,
    torch.library.triton_op("untorch::gated_delta_rule_triton", _gated_delta_rule, mutates_args=("states",)),
)


@gated_delta_rule_triton.register_kernel("cpu")
def _gated_delta_rule_cpu(*args: Any) -> torch.Tensor:
    result: torch.Tensor = gated_delta_rule(*args[:9], int(args[9]), *args[10:])
    return result


@gated_delta_rule_triton.register_fake
def _gated_delta_rule_fake(*args: Any) -> torch.Tensor:
    q, k, v, g, beta, states, state_slots, cu_seqlens_q, seqlens_k = args[:9]
    check_delta_rule(q, k, v, g, beta, states, state_slots, cu_seqlens_q, seqlens_k, 0)
    out: torch.Tensor = v.new_empty(tuple(v.shape))
    return out


CAUSAL_CONV1D = torch.ops.untorch.causal_conv1d_triton.default
GATED_DELTA_RULE = torch.ops.untorch.gated_delta_rule_triton.default
