"""How fast is a mixture of experts with NVFP4 weights? Against bfloat16 in PyTorch, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_nvfp4_moe.py [--quick] [--m 1 16]

All sides alternate, each replaying a CUDA graph of the same calls. The calls of a graph cycle through several layers,
each with its own random routing, so that weights come from HBM, as in a model. "grouped" is ``torch._grouped_mm`` for
both GEMMs, and PyTorch's operators for SiLU · gate and the weighted sum; its tokens are sorted by expert beforehand, at
no cost. "loop" is two calls of ``linear`` per expert that has tokens. The roofline is the bytes of the experts that
have tokens at the bandwidth of the GPU's data sheet.

--sm80-mean sets the largest mean M per expert that the sm_80 kernels serve; above, the WGMMA kernel does. The threshold
in native/kernels/cuda/moe/nvfp4_moe.h is read off runs with -1 and 100000.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import memory_bandwidth, seconds_alternating

sys.path.insert(0, str(ROOT))

SHAPES = {"Qwen3-30B-A3B": (128, 2048, 768, 8), "Qwen3-235B-A22B": (128, 4096, 1536, 8)}  # experts, k, width, top_k
TOKENS = [1, 4, 16, 64, 256, 2048]
LAYERS = 4
CALLS = 8
SIDES = ["untorch", "grouped", "loop"]
OPERATOR = "aoti_torch_cuda_nvfp4_moe"


class Layer:
    """Random experts, in NVFP4 and the same in bfloat16."""

    def __init__(self, experts: int, k: int, width: int, seed: int) -> None:
        import torch

        from untorch.ops.nvfp4_layout import dequantize_nvfp4

        generator = torch.Generator(device="cuda").manual_seed(seed)

        def matrices(n: int, depth: int) -> list[torch.Tensor]:
            codes = torch.randint(0, 256, (experts, n, depth // 2), generator=generator, device="cuda")
            # From 2^-2 to 2^2.
            scales = torch.randint(0x28, 0x49, (experts, n, depth // 16), generator=generator, device="cuda")
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


class Call:
    """A layer, activations, and a random routing: top_k different experts a token."""

    def __init__(self, layer: Layer, m: int, experts: int, k: int, top_k: int, seed: int) -> None:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.layer = layer
        self.x = torch.randn((m, k), generator=generator, device="cuda").to(torch.bfloat16)
        scores, ids = torch.rand((m, experts), generator=generator, device="cuda").topk(top_k)
        self.ids, self.factors = ids.int(), scores / scores.sum(-1, keepdim=True)
        order = self.ids.flatten().argsort(stable=True)
        self.sorted_x, self.inverse = self.x[order // top_k], order.argsort()
        counts = torch.bincount(self.ids.flatten(), minlength=experts)
        self.ends = counts.cumsum(0).int()
        self.groups = [(e, *torch.where(self.ids == e)) for e, count in enumerate(counts.tolist()) if count > 0]

    def grouped(self) -> Any:
        """The result by grouped GEMMs, of tokens that are sorted already."""
        import torch
        import torch.nn.functional as F  # noqa: N812 - its usual name

        w13, w2 = (w.mT for w in self.layer.wide)
        gate, up = torch._grouped_mm(self.sorted_x, w13, self.ends).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * up, w2, self.ends)[self.inverse]
        return (out.view(*self.ids.shape, -1) * self.factors[..., None]).sum(1).to(torch.bfloat16)

    def loop(self) -> Any:
        """The result expert by expert."""
        import torch
        import torch.nn.functional as F  # noqa: N812 - its usual name

        w13, w2 = self.layer.wide
        y = torch.zeros_like(self.x, dtype=torch.float32)
        for e, tokens, places in self.groups:
            gate, up = F.linear(self.x[tokens], w13[e]).chunk(2, -1)
            y.index_add_(0, tokens, F.linear(F.silu(gate) * up, w2[e]) * self.factors[tokens, places, None])
        return y.to(torch.bfloat16)


def measure(calls: list[Call], rounds: int, sides: list[str]) -> dict[str, float]:
    """Seconds of each side, after a comparison of the first call with bfloat16's."""
    import torch

    from tests.native import shim
    from tests.native.nvfp4_experts import SILU

    shim.use_torch_stream()
    first, width = calls[0], calls[0].layer.wide[1].shape[2]
    got = shim.call(OPERATOR, first.x, first.factors, first.ids, *first.layer.packed, *SILU.arguments(), returns=1)
    want = first.loop()
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.float().std()))
    handles = [[shim.handle(t) for t in (c.x, c.factors, c.ids, *c.layer.packed)] for c in calls]
    operator = getattr(shim.lib, OPERATOR)
    silu = None, None, ctypes.c_double(1.0), ctypes.c_double(0.0), None

    def ours() -> None:
        for given in handles:
            result = ctypes.c_void_p()
            shim.raise_on(operator(*given, *silu, ctypes.byref(result)))
            shim.delete(result)

    def grouped() -> None:
        for call in calls:
            call.grouped()

    def loop() -> None:
        for call in calls:
            call.loop()

    runs: dict[str, Callable[[], None]] = {"untorch": ours, "grouped": grouped, "loop": loop}
    seconds = seconds_alternating({side: (runs[side], len(calls)) for side in sides}, rounds, torch)
    for given in handles:
        for handle in given:
            shim.delete(handle)
    values = {f"{side}_seconds": value for side, value in seconds.items()}
    weights = 3 * width * first.x.shape[1]  # of an expert
    values["bytes"] = sum(len(call.groups) for call in calls) / len(calls) * weights * (0.5 + 1 / 16)
    values["operations"] = 2.0 * weights * first.ids.numel()
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--m", nargs="+", type=int, default=TOKENS, help="tokens a call")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["Qwen3-30B-A3B"], help="whose shapes")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers that calls cycle through")
    parser.add_argument("--sm80-mean", type=int, help="largest mean M per expert of the sm_80 kernels")
    options = parser.parse_args()
    if options.sm80_mean is not None:
        os.environ["UNTORCH_NVFP4_MOE_SM80_MEAN"] = str(options.sm80_mean)  # read at the first call
    import torch

    report = Report("gpu_nvfp4_moe", options.quick)
    report.values["sm80_mean"] = options.sm80_mean
    report.machine["gpu"] = torch.cuda.get_device_name()
    bandwidth = memory_bandwidth(report.machine["gpu"])
    report.values["memory_bytes_a_second"] = bandwidth
    sides = SIDES if hasattr(torch, "_grouped_mm") else [side for side in SIDES if side != "grouped"]
    rows = []
    for model in options.models:
        experts, k, width, top_k = SHAPES[model]
        layers = [Layer(experts, k, width, seed) for seed in range(options.layers)]
        for m in options.m:
            calls = [Call(layers[i % len(layers)], m, experts, k, top_k, i) for i in range(CALLS)]
            values = measure(calls, 5 if options.quick else 51 if m < 512 else 11, sides)
            values["roofline_seconds"] = values["bytes"] / bandwidth
            report.values[f"{model} m={m}"] = values
            ours, grouped, loop = (values.get(f"{side}_seconds", math.nan) for side in SIDES)
            rows.append([
                model, str(m), f"{ours * 1e6:.1f}", f"{grouped * 1e6:.1f}", f"{loop * 1e6:.1f}",
                f"{grouped / ours:.2f}", f"{loop / ours:.2f}", f"{values['bytes'] / ours / 1e12:.2f}",
                f"{values['operations'] / ours / 1e12:.0f}", f"{values['roofline_seconds'] / ours:.2f}",
            ])  # fmt: skip
        del layers
        torch.cuda.empty_cache()
    columns = [
        "model", "tokens", "untorch µs", "grouped µs", "loop µs", "grouped / untorch", "loop / untorch", "TB/s",
        "TFLOP/s", "of roofline",
    ]  # fmt: skip
    note = (
        f"One MoE layer, bfloat16 activations, random routing; medians of CUDA graph replays on "
        f"{report.machine['gpu']}, weights from HBM. Of roofline: the time that the weights' bytes need at least, as a "
        "share of untorch's."
    )
    report.tables["gpu_nvfp4_moe"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
