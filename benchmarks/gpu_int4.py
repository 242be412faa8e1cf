"""How fast are products with int4 weights? Against bfloat16 by cuBLAS and PyTorch's own int4 kernel, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_int4.py [--quick] [--groups 128 32] [--m 1 8]

All sides replay CUDA graphs of the same products, in turns. Every product of a graph has a weight of its own, and
together they are more than the second-level cache holds: weights come from memory, as they do in a model. bfloat16 is
``torch.mm`` with a linear layer's weight, int4 ours and ``torch.ops.aten._weight_int4pack_mm``. The floor is what the
bytes take at the bandwidth of the GPU's data sheet, or the operations at bfloat16's best product in the same run.

What native/kernels/cuda/w4a16/int4_heuristic.h decides is to be read off this table: --narrow-rows, --stream-rows and --mma-rows
say up to how many rows the kernels serve, asked in this order, so that runs with "0 0 0", "0 100000 0" and "0 0 100000"
compare unpacking for cuBLAS, int4_gemm_sm90 and int4_gemm_sm80. --tile-rows says which tiles int4_gemm_sm90 has, for the times in
tile_heuristic.h.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import pathlib
import sys

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import COLD_BYTES, memory_bandwidth, seconds_in_turns

sys.path.insert(0, str(ROOT))

MOST_PRODUCTS = 128
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (3072, 8192)]  # k, n
KERNELS = ("narrow_rows", "sm90_launch_m", "tile_rows", "mma_rows")
ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096]
INNER_K_TILES = 8
SIDES = ["untorch", "bf16", "torch_int4"]


class Weights:
    """Random weights of one shape: packed as many times as it takes to be cold, and in bfloat16 likewise."""

    def __init__(self, k: int, n: int, group: int) -> None:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(0)
        packed_bytes = n * k // 2
        self.count = max(2, min(MOST_PRODUCTS, -(-COLD_BYTES // packed_bytes)))
        shape = (n // 8, k // (16 * INNER_K_TILES), 32, INNER_K_TILES // 2)
        self.packed = [
            torch.randint(-(2**31), 2**31, shape, generator=generator, device="cuda", dtype=torch.int64).int()
            for _ in range(self.count)
        ]
        scales = torch.rand((k // group, n, 2), generator=generator, device="cuda") * 0.02
        self.scales = [(scales + 0.001 * i).to(torch.bfloat16) for i in range(self.count)]
        # A quarter as many bytes of int4 would stay in the cache; of bfloat16 they do not.
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
    product = shim.lib.aoti_torch_cuda__weight_int4pack_mm
    group = ctypes.c_int64(weights.group)
    outs = [torch.empty(m, weights.n, dtype=torch.bfloat16, device="cuda") for _ in weights.wide]

    def ours() -> None:
        for w, s in pairs:
            result = ctypes.c_void_p()
            shim.raise_on(product(hx, w, group, s, ctypes.byref(result)))
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
    seconds = seconds_in_turns({side: runs[side] for side in sides}, rounds, torch)
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
    parser.add_argument("--m", nargs="+", type=int, default=ROWS, help="numbers of rows")
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="k x n, like 4096x14336")
    parser.add_argument("--without-torch", action="store_true", help="leave out PyTorch's kernel, to compare our own")
    parser.add_argument("--narrow-rows", type=int, help="rows up to which int4_gemv serves: at most 16")
    parser.add_argument("--stream-rows", type=int, help="the same of int4_gemm_sm90, after it")
    parser.add_argument("--tile-rows", type=int, help="rows of its tiles: 8, 16, 32, 64, 128, 192, 224 or 256")
    parser.add_argument("--mma-rows", type=int, help="the same of int4_gemm_sm80, after both; above, weights are unpacked")
    options = parser.parse_args()
    for name in KERNELS:
        if (rows_of_kernel := getattr(options, name)) is not None:
            os.environ[f"UNTORCH_INT4_{name.upper()}"] = str(rows_of_kernel)  # read at the first product
    import torch

    report = Report("gpu_int4", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    report.values |= {name: getattr(options, name) for name in KERNELS}
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
            values["floor_seconds"] = max(values["bytes"] / bandwidth, values["operations"] / best)
            report.values.setdefault(f"group_{group}", {})[f"{shape} m={m}"] = values
            ours, bf16, theirs = (values.get(f"{side}_seconds", math.nan) for side in SIDES)
            rows.append([
                shape, str(m), f"{ours * 1e6:.1f}", f"{bf16 * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{bf16 / ours:.2f}",
                f"{theirs / ours:.2f}", f"{values['floor_seconds'] / ours:.2f}",
            ])  # fmt: skip
        columns = [
            "k×n",
            "rows",
            "untorch µs",
            "bf16 µs",
            "torch int4 µs",
            "bf16 / untorch",
            "torch / untorch",
            "floor",
        ]
        note = (
            f"Group {group}, bfloat16; medians of graph replays on {report.machine['gpu']}, weights from memory. "
            "Floor: the share of the time that bytes or operations take at best."
        )
        report.tables[f"gpu_int4_group_{group}"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
