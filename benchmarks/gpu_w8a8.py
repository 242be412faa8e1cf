"""How fast are linear layers with 8-bit weights? Against cuBLAS in bfloat16 and torch's FP8 GEMM, µs on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_w8a8.py [--quick] [--m 1 8]

All sides alternate, each replaying a CUDA graph of the same layers. Each layer of a graph has its own weight, and all
weights together exceed L2: weights come from HBM, as in a model. Ours are whole layers: activations come in bfloat16
and are rounded there. bfloat16 is ``torch.mm`` with a linear layer's weight; torch's FP8 is ``torch._scaled_mm`` with
scales of rows and columns, of activations that are in FP8 already.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import pathlib
import sys

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import COLD_BYTES, memory_bandwidth, seconds_alternating

sys.path.insert(0, str(ROOT))

MOST_WEIGHTS = 64
SHAPES = [(4096, 6144), (4096, 24576), (12288, 4096), (2048, 8192)]  # k, n
M = [1, 4, 8, 16, 64, 128, 256, 512, 2048, 8192]
KINDS = ["int8", "fp8", "blocks"]


class Weights:
    """Random weights of one shape: enough copies to exceed L2 in each kind."""

    def __init__(self, k: int, n: int) -> None:
        import torch

        from untorch.ops.w8a8 import block_scale_shape

        generator = torch.Generator(device="cuda").manual_seed(0)
        self.k, self.n = k, n
        self.count = max(2, min(MOST_WEIGHTS, -(-COLD_BYTES // (n * k))))
        base = [
            torch.randn((n, k), generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(self.count)
        ]
        self.wide = [weight.t() for weight in base[: max(2, -(-self.count // 2))]]
        scales = torch.rand(n, generator=generator, device="cuda") * 0.02 + 0.01
        blocks = torch.rand(block_scale_shape(n, k), generator=generator, device="cuda") * 0.02 + 0.01
        fp8 = [weight.mul(64).to(torch.float8_e4m3fn) for weight in base]
        int8 = [weight.mul(32).clamp(-127, 127).to(torch.int8) for weight in base]
        self.of_kind = {"int8": (int8, scales), "fp8": (fp8, scales), "blocks": (fp8, blocks)}


def measure(weights: Weights, m: int, rounds: int) -> dict[str, float]:
    import torch

    from tests.native import shim
    from untorch.ops.w8a8 import EXACT_M, SCALE_BLOCK, dequantize_w8, round_rows

    x = torch.randn(m, weights.k, device="cuda").to(torch.bfloat16)
    hx = shim.handle(x)
    shim.use_torch_stream()
    handles = {}
    for kind, (values, scale) in weights.of_kind.items():
        handles[kind] = [(shim.handle(value), shim.handle(scale)) for value in values]
        rows = x[:16]
        got = shim.call("aoti_torch_cuda_w8a8_linear", x, values[0], scale, shim.Opt(None), returns=1)[:16]
        part = SCALE_BLOCK if kind == "blocks" else weights.k
        used = rows.double() if m <= EXACT_M else round_rows(rows, values[0].dtype, part)
        want = used @ dequantize_w8(values[0], scale, torch.float64).T
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.std()))

    def ours(kind: str) -> None:
        for weight, scale in handles[kind]:
            result = ctypes.c_void_p()
            shim.raise_on(shim.lib.aoti_torch_cuda_w8a8_linear(hx, weight, scale, None, ctypes.byref(result)))
            shim.delete(result)

    outs = [torch.empty(m, weights.n, dtype=torch.bfloat16, device="cuda") for _ in weights.wide]

    def bf16() -> None:
        for out, b in zip(outs, weights.wide, strict=True):
            torch.mm(x, b, out=out)

    rounded = x.to(torch.float8_e4m3fn)
    of_rows, of_columns = torch.rand(m, 1, device="cuda"), weights.of_kind["fp8"][1].reshape(1, -1)

    def torch_fp8() -> None:
        for value in weights.of_kind["fp8"][0]:
            torch._scaled_mm(rounded, value.t(), of_rows, of_columns, out_dtype=torch.bfloat16)

    runs = {kind: ((lambda kind=kind: ours(kind)), weights.count) for kind in KINDS}
    runs |= {"bf16": (bf16, len(weights.wide)), "torch_fp8": (torch_fp8, weights.count)}
    seconds = seconds_alternating(runs, rounds, torch)
    for pairs in handles.values():
        for pair in pairs:
            for handle in pair:
                shim.delete(handle)
    shim.delete(hx)
    found = {f"{side}_seconds": value for side, value in seconds.items()}
    found["bytes"] = weights.n * (weights.k + 4.0) + 2.0 * m * (weights.k + weights.n)
    found["operations"] = 2.0 * m * weights.n * weights.k
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--m", nargs="+", type=int, default=M, help="values of M")
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="k x n, like 4096x14336")
    options = parser.parse_args()
    import torch

    report = Report("gpu_w8a8", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    bandwidth = memory_bandwidth(report.machine["gpu"])
    report.values["memory_bytes_a_second"] = bandwidth
    rows = []
    for shape in options.shapes:
        k, n = map(int, shape.split("x"))
        weights = Weights(k, n)
        for m in options.m:
            values = measure(weights, m, 5 if options.quick else 31 if m < 2048 else 11)
            report.values[f"{shape} m={m}"] = values
            times = {side: values.get(f"{side}_seconds", math.nan) for side in (*KINDS, "bf16", "torch_fp8")}
            best = min(times[kind] for kind in KINDS)
            rows.append([
                f"{k}×{n}", str(m), *(f"{1e6 * time:.1f}" for time in times.values()),
                *(f"{times['bf16'] / times[kind]:.2f}" for kind in KINDS),
                f"{values['bytes'] / bandwidth / best:.2f}", f"{values['operations'] / best / 1e12:.0f}",
            ])  # fmt: skip
        del weights
        torch.cuda.empty_cache()
    columns = [
        "K×N", "M", "int8 µs", "FP8 µs", "FP8 blocks µs", "bf16 µs", "torch FP8 µs", "bf16 / int8", "bf16 / FP8",
        "bf16 / blocks", "of the bandwidth", "TFLOP/s",
    ]  # fmt: skip
    note = (
        f"Medians of CUDA graph replays on {report.machine['gpu']}, weights from HBM. Ours are layers with bfloat16 "
        "activations, torch's FP8 a GEMM of rounded ones. The last two columns are the fastest of ours: bytes by the "
        "data sheet's bandwidth, and operations."
    )
    report.tables["gpu_w8a8"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
