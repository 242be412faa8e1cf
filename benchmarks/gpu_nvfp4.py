"""How fast is the W4A16 GEMM with NVFP4 weights? Against cuBLAS in bfloat16, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_nvfp4.py [--quick] [--m 1 8]

Both sides alternate, each replaying a CUDA graph of the same GEMMs. Each GEMM of a graph has its own weight, and all
weights together exceed L2: weights come from HBM, as in a model. bfloat16 is ``torch.mm`` with a linear layer's weight.
The roofline is the bytes at the bandwidth of the GPU's data sheet, or the operations at the rate of bfloat16's fastest
GEMM in the same run, whichever takes longer.

The thresholds in native/kernels/cuda/w4a16/nvfp4_heuristic.h are read off this table. --gemv-m, --sm90-m and --sm80-m
set the largest M of the GEMV, the sm_90 GEMM and the sm_80 GEMM, tried in this order: runs with "0 0 0", "0 100000 0"
and "0 0 100000" compare dequantising for cuBLAS with the two GEMMs. --tile-m sets the sm_90 GEMM's M tile, for the
coefficients in tile_heuristic.h.

--prefill fp8 or fp4 measures that mode too, and its error: the norm of the difference from bfloat16's result with the
same weight, over the norm of that result. Up to M of --fp8-m and --fp4-m the mode runs the exact GEMM.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import pathlib
import sys
from collections.abc import Callable

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import COLD_BYTES, memory_bandwidth, seconds_alternating

sys.path.insert(0, str(ROOT))

MOST_WEIGHTS = 128
MOST_APART = 0.2  # relative error of a result: more is a mistake
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (2048, 768)]  # k, n
M = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096]
INNER_K_TILES = 8


class Weights:
    """Random weights of one shape: enough copies in NVFP4 to exceed L2, and enough in bfloat16."""

    def __init__(self, k: int, n: int) -> None:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(0)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=torch.int64)

        self.count = max(2, min(MOST_WEIGHTS, -(-COLD_BYTES // (n * k // 2))))
        tiles = (n // 8, k // (16 * INNER_K_TILES), 32, INNER_K_TILES // 2)
        self.packed = [integers(-(2**31), 2**31, *tiles).int() for _ in range(self.count)]
        # From 2^-2 to 2^2.
        self.block_scales = [
            integers(0x28, 0x49, n, k // 16).to(torch.uint8).view(torch.float8_e4m3fn) for _ in range(self.count)
        ]
        self.global_scale = torch.full((n,), 0.01, device="cuda")
        # A third as many copies: a bfloat16 weight has almost four times the bytes, so these exceed L2 too.
        wide = max(2, -(-self.count // 3))
        self.wide = [
            torch.randn((n, k), generator=generator, device="cuda").to(torch.bfloat16).t() for _ in range(wide)
        ]
        self.k, self.n = k, n


def measure(weights: Weights, m: int, rounds: int, prefills: list[str]) -> dict[str, float]:
    """Seconds of all sides, after a comparison of one result with bfloat16's for the same weight."""
    import torch

    from tests.native import shim
    from untorch.ops.nvfp4_layout import dequantize_nvfp4

    x = torch.randn(m, weights.k, device="cuda").to(torch.bfloat16)
    name = "aoti_torch_cuda_nvfp4_linear"
    shim.use_torch_stream()
    operands = weights.packed[0], weights.block_scales[0], weights.global_scale
    got = shim.call(name, x, *operands, shim.Opt(None), "exact", returns=1)
    want = x @ dequantize_nvfp4(*operands, torch.bfloat16).t()
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.float().std()))
    values: dict[str, float] = {}
    for prefill in prefills:
        apart = shim.call(name, x, *operands, shim.Opt(None), prefill, returns=1).float() - want.float()
        values[f"{prefill}_error"] = float(torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(want.float()))
        if not values[f"{prefill}_error"] < MOST_APART:
            raise SystemExit(f"prefill {prefill}, M = {m}: relative error {values[f'{prefill}_error']}")

    hx, world = shim.handle(x), shim.handle(weights.global_scale)
    pairs = [(shim.handle(w), shim.handle(s)) for w, s in zip(weights.packed, weights.block_scales, strict=True)]
    outs = [torch.empty(m, weights.n, dtype=torch.bfloat16, device="cuda") for _ in weights.wide]
    gemm = getattr(shim.lib, name)

    def ours(prefill: bytes) -> None:
        for w, s in pairs:
            result = ctypes.c_void_p()
            shim.raise_on(gemm(hx, w, s, world, None, prefill, ctypes.byref(result)))
            shim.delete(result)

    def bf16() -> None:
        for out, b in zip(outs, weights.wide, strict=True):
            torch.mm(x, b, out=out)

    runs: dict[str, tuple[Callable[[], None], int]] = {"bf16": (bf16, len(outs))}
    for side, prefill in {"untorch": "exact", **{prefill: prefill for prefill in prefills}}.items():
        runs[side] = functools.partial(ours, prefill.encode()), len(pairs)
    seconds = seconds_alternating(runs, rounds, torch)
    for handle in (hx, world, *(handle for pair in pairs for handle in pair)):
        shim.delete(handle)
    values |= {f"{side}_seconds": value for side, value in seconds.items()}
    values["bytes"] = weights.n * weights.k * (0.5 + 1 / 16) + 2.0 * m * (weights.k + weights.n)
    values["operations"] = 2.0 * m * weights.n * weights.k
    return values


def linear(report: Report, options: argparse.Namespace, bandwidth: float) -> None:
    """The linear layer's table."""
    import torch

    results: list[tuple[str, int, dict[str, float]]] = []
    for shape in options.shapes:
        k, n = map(int, shape.split("x"))
        weights = Weights(k, n)
        for m in options.m:
            rounds = 5 if options.quick else 51 if m < 512 else 11
            results.append((f"{k}×{n}", m, measure(weights, m, rounds, options.prefill)))
        del weights
        torch.cuda.empty_cache()
    best = max(values["operations"] / values["bf16_seconds"] for _, _, values in results)
    report.values["best_operations_a_second"] = best
    rows = []
    for shape, m, values in results:
        values["roofline_seconds"] = max(values["bytes"] / bandwidth, values["operations"] / best)
        report.values.setdefault("linear", {})[f"{shape} m={m}"] = values
        ours, bf16 = values["untorch_seconds"], values["bf16_seconds"]
        rows.append([
            shape, str(m), f"{ours * 1e6:.1f}", f"{bf16 * 1e6:.1f}", f"{bf16 / ours:.2f}",
            f"{values['roofline_seconds'] / ours:.2f}",
        ])  # fmt: skip
        for prefill in options.prefill:
            asked = values[f"{prefill}_seconds"]
            rows[-1] += [f"{asked * 1e6:.1f}", f"{bf16 / asked:.2f}", f"{values[f'{prefill}_error']:.4f}"]
    note = (
        f"bfloat16 activations, a global scale per output; medians of CUDA graph replays on {report.machine['gpu']}, "
        "weights from HBM. Of roofline: the time that bytes or operations need at least, as a share of untorch's."
    )
    columns = ["K×N", "M", "untorch µs", "bf16 µs", "bf16 / untorch", "of roofline"]
    for prefill in options.prefill:
        columns += [f"{prefill} µs", f"bf16 / {prefill}", f"{prefill} error"]
    if options.prefill:
        note += " Error: relative to bfloat16's result with the same weight, for normally distributed activations."
    report.tables["gpu_nvfp4_linear"] = Table(columns, rows, note)


# Each adds its tables and values to the report.
SECTIONS: dict[str, Callable[[Report, argparse.Namespace, float], None]] = {"linear": linear}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="what to measure")
    parser.add_argument("--m", nargs="+", type=int, default=M, help="values of M")
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="k x n, like 4096x14336")
    parser.add_argument("--gemv-m", type=int, help="largest M of the GEMV: at most 16")
    parser.add_argument("--sm90-m", type=int, help="largest M of the sm_90 GEMM (WGMMA, TMA), tried after the GEMV")
    parser.add_argument("--tile-m", type=int, help="its M tile: 8, 16, 32, 64, 128, 192, 224 or 256")
    parser.add_argument(
        "--sm80-m", type=int, help="largest M of the sm_80 GEMM, tried last; above, weights are dequantised"
    )
    parser.add_argument("--prefill", nargs="+", choices=["fp8", "fp4"], default=[], help="measure that, too")
    parser.add_argument("--fp8-m", type=int, help="largest M for which prefill fp8 runs the exact GEMM")
    parser.add_argument("--fp4-m", type=int, help="the same for prefill fp4")
    parser.add_argument("--fp8-fast-accumulation", type=int, choices=[0, 1], help="cuBLASLt's mode, less precise")
    options = parser.parse_args()
    report = Report("gpu_nvfp4", options.quick)
    report.values["prefill"] = options.prefill
    for name in ("gemv_m", "sm90_m", "tile_m", "sm80_m", "fp8_m", "fp4_m", "fp8_fast_accumulation"):
        if (value := getattr(options, name)) is not None:
            os.environ[f"UNTORCH_NVFP4_{name.upper()}"] = str(value)  # read at the first GEMM
        report.values[name] = value
    import torch

    report.machine["gpu"] = torch.cuda.get_device_name()
    bandwidth = memory_bandwidth(report.machine["gpu"])
    report.values["memory_bytes_a_second"] = bandwidth
    for section in options.sections:
        SECTIONS[section](report, options, bandwidth)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
