"""Experts in NVFP4, packed in panels for integers. It needs no library: models of the conformance tests use it, too."""

from __future__ import annotations

import torch

from untorch.ops.nvfp4_layout import unpack_nvfp4
from untorch.ops.w4a8_layout import pack_nvfp4_w4a8


def packed_for_integers(weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """w13, w13_scale, w2, w2_scale and the global scales as w4a8_linear's layout has them: K and I are padded to multiples
    of 32.
    """
    w13, w13_scale, w2, w2_scale, *globals_ = weights
    made: list[torch.Tensor] = []
    for packed, scale in ((w13, w13_scale), (w2, w2_scale)):
        codes, bits = unpack_nvfp4(packed).flatten(0, 1), scale.view(torch.uint8).flatten(0, 1)
        missing = -codes.shape[1] % 32
        codes, bits = (torch.nn.functional.pad(part, (0, n)) for part, n in ((codes, missing), (bits, missing // 16)))
        made += pack_nvfp4_w4a8(codes, bits.view(torch.float8_e4m3fn))
    return (*made, *globals_)
