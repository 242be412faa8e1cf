"""``untorch::causal_conv1d``: a short causal convolution of each channel, for sequences of any lengths in one batch.

out[t, c] = bias[c] + Σ_i weight[c, i] · x[t - width + 1 + i, c], then SiLU if ``silu``. The inputs before a sequence's
first token come from its state: [width - 1, channels], the oldest first (``states``, ops/states.py). Tokens behind the
last sequence give zeros. The implementation here is the reference; libuntorch.so has the fast one.
"""

from __future__ import annotations

from typing import Any

import torch

from untorch.ops.states import DTYPES, check_states, runs

__all__ = ["C_SHIM", "OPERATOR", "causal_conv1d", "check_conv1d"]

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_causal_conv1d(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, "
    "AtenTensorHandle states, AtenTensorHandle state_slots, AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k, "
    "int64_t offset, int32_t silu, AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::causal_conv1d", mutates_args=("states",))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: int,
    silu: bool,
) -> torch.Tensor:
    """x [tokens, channels], weight [channels, width], bias [channels] → [tokens, channels]. Raises ValueError."""
    check_conv1d(x, weight, bias, states, state_slots, cu_seqlens_q, seqlens_k, offset)
    channels, width = weight.shape
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    kernel, added = weight.float()[:, None], None if bias is None else bias.float()
    for begin, end, slot, begins in runs("causal_conv1d", states.shape[0], state_slots, cu_seqlens_q, seqlens_k):
        before = x.new_zeros((width - 1, channels), dtype=torch.float32)
        kept = None if slot < 0 else states[slot, offset : offset + before.numel()].view(before.shape)
        if kept is not None and not begins:
            before = kept.clone()
        inputs = torch.cat([before, x[begin:end].float()])
        found = torch.nn.functional.conv1d(inputs.T[None], kernel, added, groups=channels)[0].T
        out[begin:end] = torch.nn.functional.silu(found) if silu else found
        if kept is not None:
            kept.copy_(inputs[len(inputs) - width + 1 :])
    return out


@causal_conv1d.register_fake
def _causal_conv1d_fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    check_conv1d(x, weight, *others[:6])
    return x.new_empty((x.shape[0], x.shape[1]))


def check_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: int,
) -> None:
    """Raises ValueError for shapes, dtypes and numbers that do not fit together."""
    if x.dtype not in DTYPES or x.dim() != 2:
        raise ValueError(
            "causal_conv1d: x: expected float32, bfloat16 or float16 [tokens, channels], got "
            f"{x.dtype} {tuple(x.shape)}"
        )
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(f"causal_conv1d: weight: expected [{channels}, width], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"causal_conv1d: bias: expected [{channels}], got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"causal_conv1d: {name}: expected {x.dtype}, as x has, got {tensor.dtype}")
    needed = channels * (weight.shape[1] - 1)
    check_states("causal_conv1d", states, state_slots, cu_seqlens_q, seqlens_k, offset, needed)


OPERATOR = torch.ops.untorch.causal_conv1d.default
