"""How fast is a mixture of experts with int4 weights? Against bfloat16 in PyTorch, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_int4_moe.py [--quick] [--m 1 8] [--groups 32]

gpu_moe.py says how it measures.
"""

from __future__ import annotations

import math

from gpu_moe import run_benchmark

TOKENS = [1, 8, 64, 512, 2048]


class Int4Layer:
    """Random experts, in int4 and the same in bfloat16."""

    def __init__(self, experts: int, k: int, width: int, group: int, seed: int) -> None:
        import torch

        from untorch.ops.int4 import dequantize_int4

        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.packed, self.wide = [], []
        self.integers, self.bytes_a_weight = [group, width], 0.5 + 4 / group
        for n, depth in ((2 * width, k), (k, width)):
            shape = (experts * n // 8, depth // 128, 32, 4)
            words = torch.randint(-(2**31), 2**31, shape, generator=generator, device="cuda", dtype=torch.int64).int()
            # Gate and up of about 1, so that SiLU does something.
            scales = torch.rand((depth // group, experts * n, 2), generator=generator, device="cuda")
            scales = (scales * (0.4 / math.sqrt(depth))).to(torch.bfloat16)
            self.packed += [words, scales]
            tiles = n // 8
            self.wide.append(
                torch.stack([
                    dequantize_int4(
                        words[e * tiles : (e + 1) * tiles], scales[:, e * n : (e + 1) * n], group, torch.bfloat16
                    )
                    for e in range(experts)
                ])
            )  # fmt: skip


if __name__ == "__main__":
    run_benchmark("int4", __doc__ or "", Int4Layer, TOKENS, [128])
