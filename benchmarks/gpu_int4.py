"""How fast is the W4A16 GEMM with int4 weights? Against cuBLAS in bfloat16 and PyTorch's int4 kernel, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_int4.py [--quick] [--groups 128 32] [--m 1 8]

All sides alternate, each replaying a CUDA graph of the same GEMMs. Each GEMM of a graph has its own weight, and all
weights together exceed L2: weights come from HBM, as in a model. bfloat16 is ``torch.mm`` with a linear layer's weight;
int4 is ours and ``torch.ops.aten._weight_int4pack_mm``. The roofline is the bytes at the bandwidth of the GPU's data
sheet, or the operations at the rate of bfloat16's fastest GEMM in the same run, whichever takes longer.

The thresholds in native/kernels/cuda/w4a16/int4_heuristic.h are read off this table. --gemv-m, --sm90-m and --sm80-m
set the largest M of the GEMV, the sm_90 GEMM and the sm_80 GEMM, tried in this order: runs with "0 0 0", "0 100000 0"
and "0 0 100000" compare dequantising for cuBLAS with the two GEMMs. --tile-m sets the sm_90 GEMM's M tile, for the
coefficients in tile_heuristic.h.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import pathlib
import sys

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import COLD_BYTES, memory_bandwidth, seconds_alternating

sys.path.insert(0, str(ROOT))

MOST_WEIGHTS = 128
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (3072, 8192)]  # k, n
LIMITS = ("gemv_m", "sm90_m", "tile_m", "sm80_m")
M = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096]
INNER_K_TILES = 8
SIDES = ["untorch", "bf16", "torch_int4"]


class Weights:
    """Random weights of one shape: enough packed copies to exceed L2, and enough in bfloat16."""

    def __init__(self, k: int, n: int, group: int) -> None:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(0)
        packed_bytes = n * k // 2
        self.count = max(2, min(MOST_WEIGHTS, -(-COLD_BYTES // packed_bytes)))
        shape = (n // 8, k // (16 * INNER_K_TILES), 32, INNER_K_TILES // 2)
        self.packed = [
            torch.randint(-(2**31), 2**31, shape, generator=generator, device="cuda", dtype=torch.int64).int()
            for _ in range(self.count)
        ]
        scales = torch.rand((k // group, n, 2), generator=generator, device="cuda") * 0.02
        self.scales = [(scales + 0.001 * i).to(torch.bfloat16) for i in range(self.count)]
        # A third as many copies: a bfloat16 weight has four times the bytes, so these exceed L2 too.
        wide = max(2, -(-self.count // 3))
        self.wide = [
            torch.randn((n, k), generator=generator, device="cuda").to(torch.bfloat16).t() for _ in range(wide)
        ]
        self.k, self.n, self.group = k, n, group


def measure(weights: Weights, m: int, rounds: int, sides: list[str]) -> dict[str, float]:
    import torch

    from tests.native import shim

    x = torch.randn(m, weights.k, device="cuda").to(torch.bfloat16)
    hx = shim.handle(x)
    pairs = [(shim.handle(w), shim.handle(s)) for w, s in zip(weights.packed, weights.scales, strict=True)]
    gemm = shim.lib.aoti_torch_cuda__weight_int4pack_mm
    group = ctypes.c_int64(weights.group)
    outs = [torch.empty(m, weights.n, dtype=torch.bfloat16, device="cuda") for _ in weights.wide]

    def ours() -> None:
        for w, s in pairs:
            result = ctypes.c_void_p()
            shim.raise_on(gemm(hx, w, group, s, ctypes.byref(result)))
            shim.delete(result)

    def bf16() -> None:
        for out, b in zip(outs, weights.wide, strict=True):
            torch.mm(x, b, out=out)

    def theirs() -> None:
        for w, s in zip(weights.packed, weights.scales, strict=True):
            torch.ops.aten._weight_int4pack_mm(x, w, weights.group, s)

    shim.use_torch_stream()
    w, s = weights.packed[0], weights.scales[0]
    got = shim.call("aoti_torch_cuda__weight_int4pack_mm", x, w, weights.group, s, returns=1)
    want = torch.ops.aten._weight_int4pack_mm(x, w, weights.group, s)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.float().std()))
    runs = {"untorch": (ours, weights.count), "bf16": (bf16, len(weights.wide)), "torch_int4": (theirs, weights.count)}
    seconds = seconds_alternating({side: runs[side] for side in sides}, rounds, torch)
    for pair in pairs:
        for handle in pair:
            shim.delete(handle)
    shim.delete(hx)
    values = {f"{side}_seconds": value for side, value in seconds.items()}
    values["bytes"] = weights.n * weights.k * (0.5 + 4 / weights.group) + 2.0 * m * (weights.k + weights.n)
    values["operations"] = 2.0 * m * weights.n * weights.k
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--groups", nargs="+", type=int, default=[128, 32], help="group sizes")
    parser.add_argument("--m", nargs="+", type=int, default=M, help="values of M")
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="k x n, like 4096x14336")
    parser.add_argument("--without-torch", action="store_true", help="leave out PyTorch's kernel, to compare our own")
    parser.add_argument("--gemv-m", type=int, help="largest M of the GEMV: at most 16")
    parser.add_argument("--sm90-m", type=int, help="largest M of the sm_90 GEMM (WGMMA, TMA), tried after the GEMV")
    parser.add_argument("--tile-m", type=int, help="its M tile: 8, 16, 32, 64, 128, 192, 224 or 256")
    parser.add_argument(
        "--sm80-m", type=int, help="largest M of the sm_80 GEMM, tried last; above, weights are dequantised"
    )
    options = parser.parse_args()
    for name in LIMITS:
        if (limit := getattr(options, name)) is not None:
            os.environ[f"UNTORCH_INT4_{name.upper()}"] = str(limit)  # read at the first GEMM
    import torch

    report = Report("gpu_int4", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    report.values |= {name: getattr(options, name) for name in LIMITS}
    bandwidth = memory_bandwidth(report.machine["gpu"])
    report.values["memory_bytes_a_second"] = bandwidth
    measured: dict[int, list[tuple[str, int, dict[str, float]]]] = {}
    for group in options.groups:
        for shape in options.shapes:
            k, n = map(int, shape.split("x"))
            weights = Weights(k, n, group)
            for m in options.m:
                sides = SIDES[:2] if options.without_torch else SIDES
                values = measure(weights, m, 5 if options.quick else 51 if m < 512 else 11, sides)
                measured.setdefault(group, []).append((f"{k}×{n}", m, values))
            del weights
            torch.cuda.empty_cache()
    best = max(v["operations"] / v["bf16_seconds"] for rows in measured.values() for _, _, v in rows)
    report.values["best_operations_a_second"] = best
    for group, results in measured.items():
        rows = []
        for shape, m, values in results:
            values["roofline_seconds"] = max(values["bytes"] / bandwidth, values["operations"] / best)
            report.values.setdefault(f"group_{group}", {})[f"{shape} m={m}"] = values
            ours, bf16, theirs = (values.get(f"{side}_seconds", math.nan) for side in SIDES)
            rows.append([
                shape, str(m), f"{ours * 1e6:.1f}", f"{bf16 * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{bf16 / ours:.2f}",
                f"{theirs / ours:.2f}", f"{values['roofline_seconds'] / ours:.2f}",
            ])  # fmt: skip
        columns = [
            "K×N", "M", "untorch µs", "bf16 µs", "torch int4 µs", "bf16 / untorch", "torch / untorch", "of roofline",
        ]  # fmt: skip
        note = (
            f"Groups of {group}, bfloat16; medians of CUDA graph replays on {report.machine['gpu']}, weights from HBM. "
            "Of roofline: the time that bytes or operations need at least, as a share of untorch's."
        )
        report.tables[f"gpu_int4_group_{group}"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
