"""NVFP4 weights, activations, and their W4A16, W8A8 or W4A4 GEMM on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.gpu.native.captured import captured
from tests.native.nvfp4_weights import BF16, E4M3, F16, F32, random_weight
from tests.native.operands import drawn_rows
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
        """As it is dequantized for a large M."""
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


def not_aligned(w: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight's codes and block scales on the GPU, one element behind an aligned address."""
    words = torch.empty(w.packed.numel() + 1, dtype=w.packed.dtype, device="cuda")[1:].view(w.packed.shape)
    scales = torch.empty(w.scales.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(w.scales.shape)
    return words.copy_(w.packed), scales.copy_(w.scales.view(torch.uint8)).view(E4M3)


def drawn_gemm(
    draw: Callable[..., Any], most_columns: int, most_k: int, least_width: int, rows: st.SearchStrategy[int]
) -> tuple[torch.Tensor, Weight, torch.Tensor | None]:
    """x on the GPU, a weight of up to 8 · ``most_columns`` rows and ``most_k`` columns, and a bias or None."""
    tiles = draw(st.sampled_from([0, 2, 4, 8, 8, 8]))
    step = 16 * max(tiles, 1)
    n, k = 8 * draw(st.integers(1, most_columns)), step * draw(st.integers(1, most_k // step))
    if tiles == 0:
        n -= draw(st.integers(0, 7))
    seed = draw(st.integers(0, 99))
    w = weight(n, k, tiles, draw(st.sampled_from([None, torch.tensor(0.03), torch.tensor([2.5])])), seed)
    dtype = draw(st.sampled_from([BF16, F16, F32]))
    width = k if draw(st.booleans()) else draw(st.integers(least_width, k))
    x = drawn_rows(draw, lambda *shape: random(*shape, dtype=dtype, seed=seed).cuda(), draw(rows), width)
    bias = draw(st.sampled_from([None, random(n, dtype=dtype, seed=seed), random(2 * n, dtype=dtype, seed=seed)[::2]]))
    return x, w, bias


def special_rows(m: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """[m, k]: rows 3 and 4 are zero, 5 tiny, 6 large, 7 of one value, 8 to 10 not finite; and which rows are finite."""
    x = random(m, k, dtype=dtype)
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x[3] = 0
    x[4] = -0.0
    x[5] = x[5].sign() * least * 32  # in bfloat16 and float32 less than a scale can be for
    x[6] = x[6] * (largest / 1e4 / x[6].abs().max())
    x[7] = 0
    x[7, 100] = 1
    bad = {8: float("inf"), 9: float("-inf"), 10: float("nan")}
    for row, value in bad.items():
        x[row, 37 * row] = value
    return x, [row for row in range(m) if row not in bad]


def replayed(rows: torch.Tensor, w: Weight, prefill: str, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """x after each replay of a graph of the GEMM with ``rows``, into ``out``, with other values in the same place."""
    x = rows.cuda()
    operands = [x, w.packed.cuda(), w.scales.cuda(), w.world.cuda()]
    with captured(LINEAR, operands, (None, prefill.encode()), out) as graph:
        for seed in (1, 2):
            x.copy_(random(*rows.shape, dtype=rows.dtype, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            yield x
