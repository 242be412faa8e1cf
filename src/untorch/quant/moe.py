"""``NVFP4MoE``: a mixture of experts, after its router, with weights in NVFP4."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from untorch.ops.nvfp4_moe import OPERATOR, check_swiglu, check_weights
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["NVFP4MoE"]


class NVFP4MoE(nn.Module):
    """Experts as gated MLPs: Σ_j topk_weights[m, j] · (W2[e] · act + b2[e]) with e = topk_ids[m, j].

    (gate, up) = W13[e] · hidden_states[m] + b13[e], act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g),
    and g = min(gate, limit). The defaults make act silu(gate) · up; gpt-oss has alpha 1.702, beta 1 and limit 7.

    w13: uint8 [E, 2·I, K / 2], E2M1 values, the even one of K in the low half; rows of the gate, then those of up.
    w13_scale: float8_e4m3fn [E, 2·I, K / 16], a scale for each 16 values.
    w2: uint8 [E, K, I / 2], and w2_scale: float8_e4m3fn [E, K, I / 16].
    w13_global: float32 [E], or [E, 2] for gate and up apart; w2_global: float32 [E]. They multiply.
    w13_bias: float32 [E, 2·I], those of the gate, then those of up; w2_bias: float32 [E, K]. None: none.
    swiglu_alpha, swiglu_beta: finite. swiglu_limit: above 0; None: none.

    All are contiguous and on one device. They keep their dtypes when the module is converted (``module.half()``).
    Raises InvalidArgumentError.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w13_global: torch.Tensor
    w2_global: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(
        self,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        w13_global: torch.Tensor,
        w2_global: torch.Tensor,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        *,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        swiglu_limit: float | None = None,
    ) -> None:
        super().__init__()
        try:
            sizes = check_weights("NVFP4MoE", w13, w13_scale, w2, w2_scale, w13_global, w2_global)
            check_swiglu("NVFP4MoE", sizes, w13.device, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        self.num_experts, self.hidden_size, self.intermediate_size = sizes
        self.register_buffer("w13", w13)
        self.register_buffer("w13_scale", w13_scale)
        self.register_buffer("w2", w2)
        self.register_buffer("w2_scale", w2_scale)
        self.register_buffer("w13_global", w13_global)
        self.register_buffer("w2_global", w2_global)
        self.register_buffer("w13_bias", w13_bias)
        self.register_buffer("w2_bias", w2_bias)
        self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit = swiglu_alpha, swiglu_beta, swiglu_limit

    def forward(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., K] to [..., K], in their dtype.

        topk_weights: floating point [..., top_k], computed with in float32. topk_ids: integers [..., top_k], from 0 to
        E - 1, or -1 for an expert that is elsewhere.
        """
        if hidden_states.dim() < 1 or hidden_states.shape[-1] != self.hidden_size:
            raise InvalidArgumentError(
                f"NVFP4MoE: hidden_states: expected {self.hidden_size} in the last dimension, got "
                f"{tuple(hidden_states.shape)}"
            )
        if topk_ids.dtype.is_floating_point or topk_ids.dtype.is_complex or topk_ids.dtype == torch.bool:
            raise InvalidArgumentError(f"NVFP4MoE: topk_ids: expected integers, got {topk_ids.dtype}")
        if not topk_weights.dtype.is_floating_point:
            raise InvalidArgumentError(f"NVFP4MoE: topk_weights: expected floating point, got {topk_weights.dtype}")
        for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
            if tensor.dim() < 1 or tensor.shape[:-1] != hidden_states.shape[:-1]:
                raise InvalidArgumentError(
                    f"NVFP4MoE: {name}: expected the dimensions of hidden_states {tuple(hidden_states.shape)} but for "
                    f"the last, got {tuple(tensor.shape)}"
                )
        if topk_ids.dtype == torch.int64:  # a conversion alone would make some expert of an id that is out of range
            topk_ids = topk_ids.clamp(-2, self.num_experts)
        tokens = math.prod(hidden_states.shape[:-1])
        y: torch.Tensor = OPERATOR(
            hidden_states.reshape(tokens, self.hidden_size).contiguous(),
            topk_weights.reshape(tokens, topk_weights.shape[-1]).to(torch.float32).contiguous(),
            topk_ids.reshape(tokens, topk_ids.shape[-1]).to(torch.int32).contiguous(),
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            self.w13_global,
            self.w2_global,
            self.w13_bias,
            self.w2_bias,
            self.swiglu_alpha,
            self.swiglu_beta,
            self.swiglu_limit,
        )
        return y.view(hidden_states.shape)

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed weights with their scales; biases do not count."""
        tensors = (self.w13, self.w13_scale, self.w2, self.w2_scale, self.w13_global, self.w2_global)
        return sum(t.numel() * t.element_size() for t in tensors)

    def extra_repr(self) -> str:
        """The sizes, and what differs from SiLU without biases."""
        text = (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}"
        )
        if self.w13_bias is not None or self.w2_bias is not None:
            biases = [name for name in ("w13_bias", "w2_bias") if getattr(self, name) is not None]
            text += f", biases={'+'.join(biases)}"
        if (self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit) != (1.0, 0.0, None):
            text += f", swiglu=({self.swiglu_alpha}, {self.swiglu_beta}, {self.swiglu_limit})"
        return text

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> NVFP4MoE:
        # module.half() means the activations: the format's dtypes are fixed, and scales would lose bits.
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self
