"""``ProjectedAttention``: nn.MultiheadAttention that calls linear layers, which can be replaced."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["PROJECTIONS", "ProjectedAttention", "linear_of"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class ProjectedAttention(nn.MultiheadAttention):
    """Computes what an nn.MultiheadAttention does, from the same memory, by calling ``PROJECTIONS``.

    Arguments and results are nn.MultiheadAttention's. It has no ``in_proj_weight``: its rows are the projections'.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    @classmethod
    def of(cls, given: nn.MultiheadAttention) -> ProjectedAttention:
        """With the settings, parameters and hooks of ``given``, which stays as it is."""
        made = cls.__new__(cls)
        made.__dict__.update(given.__dict__)
        made._parameters = {
            name: value if name in ("bias_k", "bias_v") else None for name, value in given._parameters.items()
        }
        made._modules = {}
        # What nn.TransformerEncoderLayer asks for, to see whether it may read the weights itself.
        made._qkv_same_embed_dim = False
        if given.in_proj_weight is not None:
            weights = given.in_proj_weight.detach().chunk(3)
        else:
            separate = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
            weights = tuple(weight.detach() for weight in separate)
        biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.detach().chunk(3)
        for name, weight, bias in zip(PROJECTIONS, weights, biases, strict=False):
            made._modules[name] = linear_of(weight, bias, given.training)
        out = given.out_proj
        made._modules["out_proj"] = linear_of(
            out.weight.detach(), None if out.bias is None else out.bias.detach(), given.training
        )
        return made

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs attn_mask as well, as nn.MultiheadAttention does")
        is_batched = query.dim() == 3
        if not is_batched:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        dim = 0 if not is_batched or self.batch_first else 1  # of the batch
        # Rows are projected where they lie; what is one tensor stays one, for layers that read the same input.
        given = {id(x): x if is_batched else x.unsqueeze(0) for x in (query, key, value)}
        projections = zip((self.q_proj, self.k_proj, self.v_proj), (query, key, value), strict=True)
        q, k, v = (projection(given[id(x)]).transpose(0, dim) for projection, x in projections)
        batch, length = q.shape[:2]
        hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if hint else _additive(attn_mask, q.dtype)
        padding = _additive(key_padding_mask, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(batch, 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(batch, 1, -1)], 1)
            mask, padding = _one_more(mask), _one_more(padding)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            zeros = k.new_zeros(batch, self.num_heads, 1, self.head_dim)
            k, v = torch.cat([k, zeros], 2), torch.cat([v, zeros], 2)
            mask, padding = _one_more(mask), _one_more(padding)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(batch, self.num_heads, length, -1)
        if padding is not None:
            padding = padding[:, None, None]
            mask = padding if mask is None else mask + padding
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.softmax(scores if mask is None else scores + mask, -1)
            if dropout:
                weights = F.dropout(weights, dropout)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, hint)
        out = self.out_proj(attended.transpose(1, 2).flatten(2)).transpose(0, dim)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out, weights


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, training: bool) -> nn.Linear:
    """A linear layer of a weight [out_features, in_features] and a bias, which are not copied."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made.train(training)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """What is added to the scores: -inf where a boolean mask has True."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _one_more(mask: torch.Tensor | None) -> torch.Tensor | None:
    """With a key behind the others that all may see."""
    return None if mask is None else F.pad(mask, (0, 1))
