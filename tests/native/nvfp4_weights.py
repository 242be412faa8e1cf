"""NVFP4 weights for the tests, and what ``nvfp4_linear`` refuses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from untorch.ops.nvfp4_layout import pack_nvfp4

BF16, F16, F32, I32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8
E4M3 = torch.float8_e4m3fn

Args = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def random_weight(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., n, k / 2] and block scales [..., n, k / 16], with subnormal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator)
    scales = torch.rand((*shape[:-1], shape[-1] // 16), generator=generator) * 2
    scales[..., ::5] *= 2.0**-9
    return pack_nvfp4(codes), scales.to(E4M3)


def linear_refusals(make: Callable[..., torch.Tensor]) -> list[tuple[Args, str]]:
    """Arguments that ``nvfp4_linear`` refuses (x, weight_packed, block_scale, global_scale, bias), and its words.

    make(*shape, dtype=…) gives a tensor on the device under test.
    """
    op = "nvfp4_linear"
    x, tiles, codes = make(3, 128, dtype=BF16), make(2, 1, 32, 4, dtype=I32), make(16, 64, dtype=U8)
    scales, world = make(16, 8, dtype=E4M3), make(dtype=F32)
    layout = f"{op}: argument 'weight_packed' of int32 must be packed as [n/8][k/(16*inner_k_tiles)][32]"
    return [
        ((None, tiles, scales, world, None), f"{op}: argument 'x' is null"),
        ((x, None, scales, world, None), f"{op}: argument 'weight_packed' is null"),
        ((x, tiles, None, world, None), f"{op}: argument 'block_scale' is null"),
        ((x, tiles, scales, None, None), f"{op}: argument 'global_scale' is null"),
        ((make(3, 128, dtype=torch.float64), tiles, scales, world, None),
         f"{op}: argument 'x' must be float32, bfloat16 or float16, got float64"),
        ((make(dtype=BF16), tiles, scales, world, None),
         f"{op}: argument 'x' must have at least one dimension, got shape []"),
        ((make(128, 3, dtype=BF16).t(), tiles, scales, world, None),
         f"{op}: argument 'x' must have a contiguous last dimension, got shape [3, 128] with strides [1, 3]"),
        ((make(3, 129, dtype=BF16), tiles, scales, world, None),
         f"{op}: argument 'x' has 129 features, 'weight_packed' of shape [2, 1, 32, 4] takes at most k = 128"),
        ((x, make(16, 64), scales, world, None),
         f"{op}: argument 'weight_packed' must be uint8 or int32, got float32"),
        ((x, make(16, 63, dtype=U8), scales, world, None),
         f"{op}: argument 'weight_packed' of uint8 must have shape [n, k/2] with k a multiple of 16, got [16, 63]"),
        ((x, make(1024, dtype=U8), scales, world, None),
         f"{op}: argument 'weight_packed' of uint8 must have shape [n, k/2] with k a multiple of 16, got [1024]"),
        ((x, make(64, 16, dtype=U8).t(), scales, world, None),
         f"{op}: argument 'weight_packed' must be contiguous, got shape [16, 64] with strides [1, 16]"),
        ((x, make(16, 64, dtype=I32), scales, world, None), f"{layout}[inner_k_tiles/2], got shape [16, 64]"),
        ((x, make(2, 1, 16, 4, dtype=I32), scales, world, None),
         f"{layout}[inner_k_tiles/2], got shape [2, 1, 16, 4]"),
        ((x, make(2, 1, 32, 3, dtype=I32), scales, world, None),
         f"{op}: argument 'weight_packed' must have 1, 2 or 4 in its last dimension (inner_k_tiles 2, 4 or 8), got "
         "shape [2, 1, 32, 3]"),
        ((x, make(2, 1, 4, 32, dtype=I32).mT, scales, world, None),
         f"{op}: argument 'weight_packed' must be contiguous, got shape [2, 1, 32, 4] with strides [128, 128, 1, 32]"),
        ((x, tiles, make(16, 8), world, None), f"{op}: argument 'block_scale' must be float8_e4m3fn, got float32"),
        ((x, codes, make(16, 9, dtype=E4M3), world, None),
         f"{op}: argument 'block_scale' must have shape [16, 8], got [16, 9]"),
        ((x, tiles, make(8, 16, dtype=E4M3).t(), world, None),
         f"{op}: argument 'block_scale' must be contiguous, got shape [16, 8] with strides [1, 16]"),
        ((x, tiles, scales, make(dtype=BF16), None), f"{op}: argument 'global_scale' must be float32, got bfloat16"),
        ((x, tiles, scales, make(3), None),
         f"{op}: argument 'global_scale' must be contiguous and have shape [], [1] or [16], got [3]"),
        ((x, codes, scales, make(1, 1), None),
         f"{op}: argument 'global_scale' must be contiguous and have shape [], [1] or [16], got [1, 1]"),
        ((x, tiles, scales, make(32)[::2], None),
         f"{op}: argument 'global_scale' must be contiguous and have shape [], [1] or [16], got [16]"),
        ((x, tiles, scales, world, make(15, dtype=BF16)), f"{op}: argument 'bias' must have shape [16], got [15]"),
        ((x, codes, scales, world, make(16)), f"{op}: argument 'bias' must be bfloat16 like 'x', got float32"),
    ]  # fmt: skip


# What `prefill` of it refuses, behind good operands.
PREFILL_REFUSALS = [
    (None, "nvfp4_linear: argument 'prefill' is null"),
    ("fp16", "nvfp4_linear: argument 'prefill' must be exact, fp8 or fp4, got 'fp16'"),
    ("", "nvfp4_linear: argument 'prefill' must be exact, fp8 or fp4, got ''"),
]
