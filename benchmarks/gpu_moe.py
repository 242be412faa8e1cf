"""What the benchmarks of mixtures of experts share, gpu_int4_moe.py and gpu_nvfp4_moe.py: a layer against bfloat16 in
PyTorch, µs on the device.

All sides alternate, each replaying a CUDA graph of the same calls. The calls of a graph cycle through several layers,
each with its own random routing, so that weights come from HBM, as in a model. "grouped" is ``torch._grouped_mm`` for
both GEMMs, and PyTorch's operators for SiLU · gate and the weighted sum; its tokens are sorted by expert beforehand, at
no cost. "loop" is two calls of ``linear`` per expert that has tokens. The roofline is the bytes of the experts that
have tokens at the bandwidth of the GPU's data sheet.

--sm80-mean sets the largest mean M per expert that the sm_80 kernels serve; above, the WGMMA kernel does. The threshold
in native/kernels/cuda/moe/w4a16_moe.h is read off runs with -1 and 100000.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import memory_bandwidth, seconds_alternating

sys.path.insert(0, str(ROOT))

__all__ = ["Layer", "run_benchmark"]

SHAPES = {"Qwen3-30B-A3B": (128, 2048, 768, 8), "Qwen3-235B-A22B": (128, 4096, 1536, 8)}  # experts, k, width, top_k
LAYERS = 4
CALLS = 8
SIDES = ["untorch", "grouped", "loop"]


class Layer(Protocol):
    """Random experts, packed and the same in bfloat16."""

    packed: list[Any]  # tensors that the operator takes behind the routing
    integers: list[int]  # and numbers behind those
    wide: list[Any]  # [experts, 2·width, k] and [experts, k, width]
    bytes_a_weight: float


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


def _measure(operator: str, calls: list[Call], rounds: int, sides: list[str]) -> dict[str, float]:
    """Seconds of each side, after a comparison of the first call with bfloat16's."""
    import torch

    from tests.native import shim
    from tests.native.nvfp4_experts import SILU

    shim.use_torch_stream()
    first, width = calls[0], calls[0].layer.wide[1].shape[2]
    layer = first.layer
    given = first.x, first.factors, first.ids, *layer.packed, *layer.integers
    got = shim.call(operator, *given, *SILU.arguments(), returns=1)
    want = first.loop()
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.float().std()))
    handles = [[shim.handle(t) for t in (c.x, c.factors, c.ids, *c.layer.packed)] for c in calls]
    entry = getattr(shim.lib, operator)
    silu = *map(ctypes.c_int64, layer.integers), None, None, ctypes.c_double(1.0), ctypes.c_double(0.0), None

    def ours() -> None:
        for given in handles:
            result = ctypes.c_void_p()
            shim.raise_on(entry(*given, *silu, ctypes.byref(result)))
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
    values["bytes"] = sum(len(call.groups) for call in calls) / len(calls) * weights * layer.bytes_a_weight
    values["operations"] = 2.0 * weights * first.ids.numel()
    return values


def run_benchmark(
    kind: str,
    description: str,
    make_layer: Callable[[int, int, int, int, int], Layer],
    tokens: list[int],
    groups: list[int],
) -> None:
    """The script's main. kind: "int4" or "nvfp4". make_layer: of experts, k, width, weights of a scale, and a seed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--m", nargs="+", type=int, default=tokens, help="tokens a call")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["Qwen3-30B-A3B"], help="whose shapes")
    parser.add_argument("--groups", nargs="+", type=int, default=groups, help="weights that share a scale")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers that calls cycle through")
    parser.add_argument("--sm80-mean", type=int, help="largest mean M per expert of the sm_80 kernels")
    options = parser.parse_args()
    if options.sm80_mean is not None:
        # Read at the first call.
        os.environ[f"UNTORCH_{kind.upper()}_MOE_SM80_MEAN"] = str(options.sm80_mean)
    import torch

    report = Report(f"gpu_{kind}_moe", options.quick)
    report.values["sm80_mean"] = options.sm80_mean
    report.machine["gpu"] = torch.cuda.get_device_name()
    bandwidth = memory_bandwidth(report.machine["gpu"])
    report.values["memory_bytes_a_second"] = bandwidth
    sides = SIDES if hasattr(torch, "_grouped_mm") else [side for side in SIDES if side != "grouped"]
    rows = []
    for model, group in itertools.product(options.models, options.groups):
        experts, k, width, top_k = SHAPES[model]
        layers = [make_layer(experts, k, width, group, seed) for seed in range(options.layers)]
        for m in options.m:
            calls = [Call(layers[i % len(layers)], m, experts, k, top_k, i) for i in range(CALLS)]
            rounds = 5 if options.quick else 51 if m < 512 else 11
            values = _measure(f"aoti_torch_cuda_{kind}_moe", calls, rounds, sides)
            values["roofline_seconds"] = values["bytes"] / bandwidth
            report.values[f"{model} m={m}" + (f" group={group}" if len(options.groups) > 1 else "")] = values
            ours, grouped, loop = (values.get(f"{side}_seconds", math.nan) for side in SIDES)
            rows.append([
                model, str(group), str(m), f"{ours * 1e6:.1f}", f"{grouped * 1e6:.1f}", f"{loop * 1e6:.1f}",
                f"{grouped / ours:.2f}", f"{loop / ours:.2f}", f"{values['bytes'] / ours / 1e12:.2f}",
                f"{values['operations'] / ours / 1e12:.0f}", f"{values['roofline_seconds'] / ours:.2f}",
            ])  # fmt: skip
        del layers
        torch.cuda.empty_cache()
    columns = [
        "model", "group", "tokens", "untorch µs", "grouped µs", "loop µs", "grouped / untorch", "loop / untorch",
        "TB/s", "TFLOP/s", "of roofline",
    ]  # fmt: skip
    if groups == options.groups and len(groups) == 1:  # the only one
        columns, rows = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows]
    note = (
        f"One MoE layer, bfloat16 activations, random routing; medians of CUDA graph replays on "
        f"{report.machine['gpu']}, weights from HBM. Of roofline: the time that the weights' bytes need at least, as a "
        "share of untorch's."
    )
    report.tables[f"gpu_{kind}_moe"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))
