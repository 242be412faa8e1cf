"""Multi-head latent attention (MLA): pages keep a token's latent, and no head's keys and values.

A layer expands the latent c of a token to the keys and values of all heads by one matrix, k = W_k c and v = W_v c. As
q · W_k c = (W_kᵀ q) · c, and Σ p W_v c = W_v Σ p c, queries and outputs are multiplied instead: attention is over one
KV head of latents, with the shared rotary part of the keys behind them. Layers are found by their attributes; each
result is compared with that of expanded keys while layers are recorded, and a layer that differs keeps expanded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Latents", "latent_layers", "latent_projections"]

_ATTRIBUTES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def latent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Attention modules that expand latents by ``kv_b_proj``, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, attribute, None), int) for attribute in _ATTRIBUTES)
        and isinstance(projection := getattr(module, "kv_b_proj", None), nn.Linear)
        and projection.bias is None
    }


@dataclass
class Latents:
    """What the projections of a run were given. absorbed: the modules whose pages keep latents."""

    absorbed: set[nn.Module] = field(default_factory=set)
    given: dict[nn.Module, torch.Tensor] = field(default_factory=dict)

    def key(self, module: Any, k: torch.Tensor) -> torch.Tensor:
        """[tokens, 1, rank + rotary]: the latents, and the rotary part of the keys k [tokens, heads, width]."""
        latent = self.given[module]
        return torch.cat([latent, k[:, 0, module.qk_nope_head_dim :]], -1).unsqueeze(1)

    def query(self, module: Any, q: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, rank + rotary] for q [tokens, heads, width]."""
        nope = module.qk_nope_head_dim
        absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], _matrix(module)[:, :nope])
        return torch.cat([absorbed, q[..., nope:]], -1)

    def value(self, module: Any) -> torch.Tensor:
        """[tokens, 1, rank]."""
        return self.given[module].unsqueeze(1)

    def expand(self, module: Any, out: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, width_v] of attention's out [tokens, heads, rank]."""
        return torch.einsum("thr,hvr->thv", out, _matrix(module)[:, module.qk_nope_head_dim :])

    @staticmethod
    def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether two results are the same but for rounding."""
        if found.shape != expected.shape:
            return False
        difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
        return bool(difference <= _TOLERANCE.get(found.dtype, 1e-4) * max(largest, 1e-6))


def _matrix(module: Any) -> torch.Tensor:
    """[heads, width of a key without its rotary part + of a value, rank]."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)


@contextmanager
def latent_projections(layers: dict[str, nn.Module], latents: Latents) -> Iterator[None]:
    """Notes what each projection is given; those of absorbed layers compute nothing meanwhile."""

    def watched(module: Any) -> Any:
        projection = module.kv_b_proj
        own = projection.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            latents.given[module] = x.reshape(-1, x.shape[-1])
            if module not in latents.absorbed:
                result: torch.Tensor = own(x)
                return result
            return x.new_zeros(()).expand(*x.shape[:-1], projection.out_features)

        return forward

    for module in layers.values():
        vars(module.kv_b_proj)["forward"] = watched(module)
    try:
        yield
    finally:
        for module in layers.values():
            vars(module.kv_b_proj).pop("forward", None)
        latents.given.clear()
