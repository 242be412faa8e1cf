"""8-bit weights for the tests of ``w8a8_linear``, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from untorch.ops.w8a8 import block_scale_shape

BF16, F16, F32, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
E4M3 = torch.float8_e4m3fn
KINDS = ("int8", "fp8", "blocks")

Args = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def random_w8(n: int, k: int, kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [n, k] of all bytes but NaN, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int16).to(I8)
    if kind == "int8":
        return values, torch.rand(n, generator=generator) * 0.01 + 0.001
    codes = values.masked_fill((values & 127) == 127, 5).view(E4M3)
    shape = block_scale_shape(n, k) if kind == "blocks" else (n,)
    return codes, torch.rand(shape, generator=generator) * 0.01 + 0.001


def refusals(make: Callable[..., torch.Tensor]) -> list[tuple[Args, str]]:
    """Arguments that ``w8a8_linear`` refuses (x, weight, scale, bias), and its words.

    make(*shape, dtype=…) gives a tensor on the device under test.
    """
    op = "w8a8_linear"
    x, weight, scale = make(3, 64, dtype=BF16), make(32, 64, dtype=I8), make(32, dtype=F32)
    fp8, blocks = make(256, 640, dtype=E4M3), make(2, 8, dtype=F32)
    wide = make(3, 640, dtype=BF16)
    sizes = f"{op}: argument 'weight' must be contiguous with sizes that are multiples of 16, got shape"
    return [
        ((None, weight, scale, None), f"{op}: argument 'x' is null"),
        ((x, None, scale, None), f"{op}: argument 'weight' is null"),
        ((x, weight, None, None), f"{op}: argument 'scale' is null"),
        ((make(3, 64, dtype=torch.float64), weight, scale, None),
         f"{op}: argument 'x' must be float32, bfloat16 or float16, got float64"),
        ((make(dtype=BF16), weight, scale, None),
         f"{op}: argument 'x' must have at least one dimension, got shape []"),
        ((make(3, 65, dtype=BF16), weight, scale, None),
         f"{op}: argument 'x' has 65 features, 'weight' of shape [32, 64] takes at most 64"),
        ((x, make(32, 64, dtype=torch.uint8), scale, None),
         f"{op}: argument 'weight' must be int8 or float8_e4m3fn, got uint8"),
        ((x, make(32, dtype=I8), scale, None), f"{op}: argument 'weight' must be 2-D, got shape [32]"),
        ((x, make(30, 64, dtype=I8), scale, None), f"{sizes} [30, 64] with strides [64, 1]"),
        ((x, make(32, 72, dtype=I8), scale, None), f"{sizes} [32, 72] with strides [72, 1]"),
        ((x, make(64, 32, dtype=I8).t(), scale, None), f"{sizes} [32, 64] with strides [1, 32]"),
        ((x, weight, make(32, dtype=BF16), None), f"{op}: argument 'scale' must be float32, got bfloat16"),
        ((x, weight, make(1, 4, dtype=F32), None), f"{op}: argument 'scale' must have shape [32], got [1, 4]"),
        ((wide, fp8, make(255, dtype=F32), None), f"{op}: argument 'scale' must have shape [256], got [255]"),
        ((wide, fp8, make(2, 5, dtype=F32), None), f"{op}: argument 'scale' must have shape [2, 8], got [2, 5]"),
        ((wide, fp8, make(8, 2, dtype=F32).t(), None),
         f"{op}: argument 'scale' must be contiguous, got shape [2, 8] with strides [1, 2]"),
        ((x, weight, scale, make(31, dtype=BF16)), f"{op}: argument 'bias' must"),
        ((wide, fp8, blocks, make(256, dtype=F32)), f"{op}: argument 'bias' must"),
    ]  # fmt: skip
