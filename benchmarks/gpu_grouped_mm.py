"""How fast is a mixture of experts with dense weights? `_grouped_mm` against PyTorch's, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_grouped_mm.py [--quick] [--tokens 1 64]

Both sides alternate, each replaying a CUDA graph of the same calls. The calls of a graph have different random routings
and alternate between two layers, so that weights come from HBM, as in a model. "up" and "down" are
the two GEMMs of a layer, on tokens that are sorted by expert; "layer" is a whole one with PyTorch's operators around
them: sort by expert, gather, up, SiLU · gate, down, and the weighted sum. The weight is [experts, N, K], transposed, as
transformers has it. The roofline is the larger of two times: the bytes of the experts that have tokens, of activations
and results, at the bandwidth of the GPU's data sheet, and the operations at its peak.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import memory_bandwidth, seconds_alternating

sys.path.insert(0, str(ROOT))

# experts, hidden size, intermediate size, top_k
SHAPES = {"Qwen3-30B-A3B": (128, 2048, 768, 8), "Mixtral-8x7B": (8, 4096, 14336, 2)}
TOKENS = [1, 8, 64, 512, 4096]
LAYERS = 2
CALLS = 4
PEAK_BF16 = 989e12  # dense, of an H100 or H200 SXM by the data sheet
OPERATOR = "aoti_torch_cuda__grouped_mm"
GroupedMm = Callable[[Any, Any, Any], Any]


class Routing:
    """Random tokens, each with top_k different experts, sorted by expert."""

    def __init__(self, tokens: int, experts: int, top_k: int, widths: tuple[int, ...], seed: int) -> None:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(seed)
        scores, ids = torch.rand((tokens, experts), generator=generator, device="cuda").topk(top_k)
        self.ids, self.factors = ids, (scores / scores.sum(-1, keepdim=True)).to(torch.bfloat16)
        counts = torch.bincount(ids.flatten(), minlength=experts)
        self.ends, self.active = counts.cumsum(0).int(), int((counts > 0).sum())
        self.sorted = {
            k: torch.randn((tokens * top_k, k), generator=generator, device="cuda").to(torch.bfloat16) for k in widths
        }
        self.x = torch.randn((tokens, widths[0]), generator=generator, device="cuda").to(torch.bfloat16)


class Memory:
    """Device memory of 2-byte elements, for torch.as_tensor."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<u2", "version": 3}


def ours() -> GroupedMm:
    """A call of the C function on torch's tensors. The result's memory is free for the call after the next kernel."""
    import torch

    from tests.native import shim

    operator = getattr(shim.lib, OPERATOR)

    def grouped_mm(a: Any, b: Any, ends: Any) -> Any:
        given, offs, result = [shim.handle(t) for t in (a, b)], shim.handle(ends), ctypes.c_void_p()
        shim.raise_on(operator(*given, ctypes.byref(offs), None, None, ctypes.byref(result)))
        address = ctypes.c_void_p()
        shim.raise_on(shim.lib.aoti_torch_get_data_ptr(result, ctypes.byref(address)))
        out = torch.as_tensor(Memory(address.value or 0, (a.shape[0], b.shape[2])), device="cuda")
        for handle in (*given, offs, result):
            shim.delete(handle)
        return out.view(a.dtype)

    return grouped_mm


def layer(grouped_mm: GroupedMm, routing: Routing, up: Any, down: Any) -> Any:
    """A mixture of experts as transformers' grouped_mm_experts_forward computes it."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - its usual name

    tokens, top_k = routing.ids.shape
    ids, order = routing.ids.flatten().sort()
    ends = torch.histc(ids.int(), bins=up.shape[0], min=0, max=up.shape[0] - 1).cumsum(0, dtype=torch.int32)
    gate, half = grouped_mm(routing.x[order // top_k], up, ends).chunk(2, -1)
    out = grouped_mm(F.silu(gate) * half, down, ends) * routing.factors.flatten()[order, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device="cuda")
    return out[inverse].view(tokens, top_k, -1).sum(1)


def measure(
    sides: dict[str, GroupedMm], weights: list[list[Any]], routings: list[Routing], index: int | None, rounds: int
) -> dict[str, float]:
    """Seconds of each side for GEMM ``index`` of a layer, or a whole one (None), after a comparison of both."""
    import torch

    def one(grouped_mm: GroupedMm, i: int) -> Any:
        routing, pair = routings[i], weights[i % len(weights)]
        if index is None:
            return layer(grouped_mm, routing, *pair)
        return grouped_mm(routing.sorted[pair[index].shape[1]], pair[index], routing.ends)

    def calls(grouped_mm: GroupedMm) -> Callable[[], None]:
        def run() -> None:
            for i in range(len(routings)):
                one(grouped_mm, i)

        return run

    got, want = (one(side, 0) for side in sides.values())
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.float().std()))
    del got, want
    runs = {side: (calls(grouped_mm), len(routings)) for side, grouped_mm in sides.items()}
    return {f"{side}_seconds": value for side, value in seconds_alternating(runs, rounds, torch).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="tokens a call")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="whose shapes")
    options = parser.parse_args()
    import torch

    from tests.native import shim

    shim.use_torch_stream()
    report = Report("gpu_grouped_mm", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    bandwidth = memory_bandwidth(report.machine["gpu"])
    report.values["memory_bytes_a_second"], report.values["operations_a_second"] = bandwidth, PEAK_BF16
    sides: dict[str, GroupedMm] = {"untorch": ours(), "torch": lambda a, b, ends: torch._grouped_mm(a, b, ends)}
    rows = []
    for model in options.models:
        experts, hidden, width, top_k = SHAPES[model]
        shapes = [(hidden, 2 * width), (width, hidden)]  # K and N, of up and down
        weights = [
            [
                (torch.randn((experts, n, k), device="cuda", dtype=torch.bfloat16) / math.sqrt(k)).mT
                for k, n in shapes
            ]
            for _ in range(LAYERS)
        ]  # fmt: skip
        for tokens in options.tokens:
            routings = [Routing(tokens, experts, top_k, (hidden, width), seed) for seed in range(CALLS)]
            rounds = 5 if options.quick else 31 if tokens < 4096 else 11
            pairs, active = tokens * top_k, sum(r.active for r in routings) / CALLS
            for name, index in (("up", 0), ("down", 1), ("layer", None)):
                values = measure(sides, weights, routings, index, rounds)
                gemms = shapes if index is None else [shapes[index]]
                values["bytes"] = sum(2.0 * (active * k * n + pairs * (k + n)) for k, n in gemms)
                values["operations"] = sum(2.0 * pairs * k * n for k, n in gemms)
                values["roofline_seconds"] = max(values["bytes"] / bandwidth, values["operations"] / PEAK_BF16)
                report.values[f"{model} {name} tokens={tokens}"] = values
                mine, theirs = values["untorch_seconds"], values["torch_seconds"]
                rows.append([
                    f"{model} {name}", str(tokens), f"{mine * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{theirs / mine:.2f}",
                    f"{values['bytes'] / mine / 1e12:.2f}", f"{values['operations'] / mine / 1e12:.0f}",
                    f"{values['roofline_seconds'] / mine:.2f}",
                ])  # fmt: skip
        del weights
        torch.cuda.empty_cache()
    columns = ["GEMM", "tokens", "untorch µs", "torch µs", "torch / untorch", "TB/s", "TFLOP/s", "of roofline"]
    note = (
        f"bfloat16, random routing; medians of CUDA graph replays on {report.machine['gpu']}, weights from HBM. Of "
        "roofline: the least time that bytes and operations need, as a share of untorch's; of a layer, of its GEMMs."
    )
    report.tables["gpu_grouped_mm"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
