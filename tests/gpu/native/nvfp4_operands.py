"""Weights in NVFP4, rows, and the product of both on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.native.nvfp4_weights import random_weight
from tests.native.shim import Opt, call
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4_tiles

LINEAR = "aoti_torch_cuda_nvfp4_linear"


@dataclass
class Weight:
    """packed: bytes, or tiles. dense: its exact values, float64 [n, k]."""

    packed: torch.Tensor
    scales: torch.Tensor
    world: torch.Tensor
    dense: torch.Tensor

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """As it is unpacked for many rows."""
        return dequantize_nvfp4(self.packed, self.scales, self.world, dtype).double()


def weight(n: int, k: int, tiles: int = 8, world: torch.Tensor | None = None, seed: int = 0) -> Weight:
    """tiles 0: bytes. Without ``world`` every row has a global scale of its own."""
    packed, scales = random_weight(n, k, seed=seed)
    if world is None:
        world = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 0.3 + 0.05
    dense = dequantize_nvfp4(packed, scales, world, torch.float64)
    return Weight(pack_nvfp4_tiles(packed, tiles) if tiles else packed, scales, world, dense)


def linear(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None, prefill: str = "exact") -> torch.Tensor:
    added = None if bias is None else bias.cuda()
    operands = x, w.packed.cuda(), w.scales.cuda(), w.world.cuda()
    got: torch.Tensor = call(LINEAR, *operands, Opt(added), prefill, returns=1)
    return got


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)
