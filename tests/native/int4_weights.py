"""Int4 weights for the tests, packed by definition, one value after the other in numpy; and what the layer refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


def pack(values: torch.Tensor, inner_k_tiles: int = 8) -> torch.Tensor:
    """Values 0 … 15 [n, k] as int32 [n/8][k/(16·inner_k_tiles)][32][inner_k_tiles/2].

    A lane holds of each 16 x 8 tile the four values of column lane / 4 in the rows 2·(lane % 4) + {0, 1, 8, 9}; a word
    has two tiles' in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest nibble on.
    """
    n, k = values.shape
    q = values.numpy().astype(np.uint32)
    out = np.zeros((n // 8, k // (16 * inner_k_tiles), 32, inner_k_tiles // 2), dtype=np.uint32)
    for lane in range(32):
        for word in range(inner_k_tiles // 2):
            for place, entry in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                row = 16 * (entry // 4) + 2 * (lane % 4) + (0, 1, 8, 9)[entry % 4] + 32 * word
                picked = q[lane // 4 :: 8, row :: 16 * inner_k_tiles]
                out[:, :, lane, word] |= picked << np.uint32(4 * place)
    return torch.from_numpy(out.view(np.int32))


@dataclass
class Int4Weight:
    """A random weight: what the operators take, and its value in float64 [n, k]."""

    packed: torch.Tensor
    scales: torch.Tensor
    group: int
    dense: torch.Tensor


def random_weight(
    n: int, k: int, group: int, inner_k_tiles: int = 8, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Int4Weight:
    """Weights of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (n, k), generator=generator)
    scale = torch.rand((k // group, n), generator=generator) * 0.2 + 0.05
    zero = torch.randn((k // group, n), generator=generator) * 0.3
    scales = torch.stack([scale, zero], dim=-1).to(dtype)
    wide = scales.double().repeat_interleave(group, dim=0)
    dense = (values.double() - 8) * wide[:, :, 0].t() + wide[:, :, 1].t()
    return Int4Weight(pack(values, inner_k_tiles), scales.contiguous(), group, dense)


Args = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int, torch.Tensor | None]
BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32


def linear_refusals(make: Callable[..., torch.Tensor]) -> list[tuple[Args, str]]:
    """Arguments that ``int4_linear`` refuses (x, weight, scale_and_zero, group_size, bias), and its words.

    make(*shape, dtype=…) gives a tensor on the device under test.
    """
    x, weight, scales = make(3, 128, dtype=BF16), make(2, 1, 32, 4, dtype=I32), make(2, 16, 2, dtype=BF16)
    layout = "int4_linear: argument 'weight' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got"
    return [
        ((None, weight, scales, 64, None), "int4_linear: argument 'x' is null"),
        ((x, None, scales, 64, None), "int4_linear: argument 'weight' is null"),
        ((x, weight, None, 64, None), "int4_linear: argument 'scale_and_zero' is null"),
        ((make(3, 128, dtype=torch.float64), weight, scales, 64, None),
         "int4_linear: argument 'x' must be float32, bfloat16 or float16, got float64"),
        ((make(3, 128, dtype=torch.int8), weight, scales, 64, None),
         "int4_linear: argument 'x' must be float32, bfloat16 or float16, got int8"),
        ((make(dtype=BF16), weight, scales, 64, None),
         "int4_linear: argument 'x' must have at least one dimension, got shape []"),
        ((make(128, 3, dtype=BF16).t(), weight, scales, 64, None),
         "int4_linear: argument 'x' must have a contiguous last dimension, got shape [3, 128] with strides [1, 3]"),
        ((x, make(2, 1, 32, 4, dtype=torch.int64), scales, 64, None),
         "int4_linear: argument 'weight' must be int32, got int64"),
        ((x, make(16, 64, dtype=I32), scales, 64, None), f"{layout} shape [16, 64]"),
        ((x, make(2, 1, 16, 4, dtype=I32), scales, 64, None), f"{layout} shape [2, 1, 16, 4]"),
        ((x, make(2, 1, 32, 3, dtype=I32), scales, 64, None),
         "int4_linear: argument 'weight' must have 1, 2 or 4 in its last dimension (inner_k_tiles 2, 4 or 8), got shape "
         "[2, 1, 32, 3]"),
        ((x, make(2, 1, 4, 32, dtype=I32).mT, scales, 64, None),
         "int4_linear: argument 'weight' must be contiguous, got shape [2, 1, 32, 4] with strides [128, 128, 1, 32]"),
        ((x, weight, scales, 48, None),
         "int4_linear: argument 'group_size' must be 32, 64, 128 or 256, got 48"),
        ((x, weight, scales, 256, None),
         "int4_linear: argument 'group_size' must divide k, got 256 for a weight of k = 128"),
        ((make(3, 0, dtype=BF16), make(2, 0, 32, 4, dtype=I32), make(0, 16, 2, dtype=BF16), 32, None),
         "int4_linear: argument 'group_size' must divide k, got 32 for a weight of k = 0"),
        ((x, weight, make(4, 16, 2, dtype=BF16), 64, None),
         "int4_linear: argument 'scale_and_zero' must have shape [2, 16, 2] (groups, columns, scale and zero), got "
         "[4, 16, 2]"),
        ((x, weight, make(2, 2, 16, dtype=BF16).mT, 64, None),
         "int4_linear: argument 'scale_and_zero' must be contiguous, got shape [2, 16, 2] with strides [32, 1, 16]"),
        ((x, weight, make(2, 16, 2, dtype=torch.float64), 64, None),
         "int4_linear: argument 'scale_and_zero' must be float32, bfloat16 or float16, got float64"),
        ((make(3, 129, dtype=BF16), weight, scales, 64, None),
         "int4_linear: argument 'x' has 129 features, 'weight' of shape [2, 1, 32, 4] takes at most k = 128"),
        ((x, weight, scales, 64, make(15, dtype=BF16)), "int4_linear: argument 'bias' must have shape [16], got [15]"),
        ((x, weight, scales, 64, make(1, 16, dtype=BF16)),
         "int4_linear: argument 'bias' must have shape [16], got [1, 16]"),
        ((x, weight, scales, 64, make(16)), "int4_linear: argument 'bias' must be bfloat16 like 'x', got float32"),
    ]  # fmt: skip
