"""How fast is a mixture of experts with NVFP4 weights? Against bfloat16 in PyTorch, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_nvfp4_moe.py [--quick] [--m 1 16]

gpu_moe.py says how it measures.
"""

from __future__ import annotations

import math

from gpu_moe import run_benchmark

TOKENS = [1, 4, 16, 64, 256, 2048]


class Nvfp4Layer:
    """Random experts, in NVFP4 and the same in bfloat16."""

    def __init__(self, experts: int, k: int, width: int, group: int, seed: int) -> None:
        import torch

        from untorch.ops.nvfp4_layout import dequantize_nvfp4

        generator = torch.Generator(device="cuda").manual_seed(seed)
        integers: list[int] = []
        self.integers, self.bytes_a_weight = integers, 0.5 + 1 / 16

        def matrices(n: int, depth: int) -> list[torch.Tensor]:
            codes = torch.randint(0, 256, (experts, n, depth // 2), generator=generator, device="cuda")
            # From 2^-2 to 2^2.
            scales = torch.randint(0x28, 0x49, (experts, n, depth // group), generator=generator, device="cuda")
            return [codes.to(torch.uint8), scales.to(torch.uint8).view(torch.float8_e4m3fn)]

        # Gate and up of about 1, so that SiLU does something.
        worlds = [torch.full((experts,), 0.2 / math.sqrt(depth), device="cuda") for depth in (k, width)]
        self.packed = [*matrices(2 * width, k), *matrices(k, width), *worlds]
        self.wide = [
            torch.stack([
                dequantize_nvfp4(codes[e], scales[e], world[e], torch.bfloat16) for e in range(experts)
            ])
            for codes, scales, world in (
                (*self.packed[:2], worlds[0]), (*self.packed[2:4], worlds[1])
            )
        ]  # fmt: skip


if __name__ == "__main__":
    run_benchmark("nvfp4", __doc__ or "", Nvfp4Layer, TOKENS, [16])
