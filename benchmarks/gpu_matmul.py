"""How fast is GEMM on the GPU? mm against torch.mm, microseconds a GEMM on the device.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/gpu_matmul.py [--quick] [--dtypes bfloat16]

Both sides alternate, each replaying a CUDA graph of the same GEMMs, so that neither pays for its host code; the cost
of a call on the host is a column of its own. Each GEMM of a graph has its own weight, and all weights together exceed
L2: weights come from HBM, as in a model. B is a linear layer's weight ([N, K], passed transposed) unless the label says
that it is row-major. The thresholds in native/kernels/cuda/gemm/heuristic.h are read off this table: our kernels serve
M up to 16, larger M goes to cuBLAS on both sides.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from common import RESULTS, ROOT, WORK, Report, Table
from gpu_common import captured, seconds_a_replay

sys.path.insert(0, str(ROOT))

COLD_BYTES = 192 << 20  # more than twice the L2 of the largest GPUs
DTYPES = ["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Case:
    """a [m, k] times b [k, n]."""

    m: int
    n: int
    k: int
    columns: bool = True  # b is column-major: a transposed weight

    def label(self) -> str:
        """How the table names it."""
        return f"{self.m}×{self.k} · {self.k}×{self.n}" + ("" if self.columns else ", B row-major")


CASES = [
    Case(1, 4096, 4096),
    Case(1, 14336, 4096),
    Case(1, 4096, 14336),
    Case(1, 4096, 4096, columns=False),
    Case(2, 4096, 4096),
    Case(4, 4096, 4096),
    Case(8, 64, 256),
    Case(8, 256, 64),
    Case(8, 1024, 1024),
    Case(8, 4096, 4096),
    Case(8, 4096, 4096, columns=False),
    Case(16, 4096, 4096),
    Case(16, 14336, 4096),
    Case(16, 1024, 1024, columns=False),
    Case(32, 4096, 4096),
    Case(64, 256, 64),
    Case(64, 1024, 1024),
    Case(128, 4096, 4096),
    Case(1024, 4096, 4096),
    Case(8192, 8192, 8192),
]


def measure(case: Case, dtype_name: str, rounds: int) -> dict[str, float]:
    import torch

    from tests.native import shim

    dtype = getattr(torch, dtype_name)
    size = torch.empty(0, dtype=dtype).element_size()
    count = max(1, min(256, COLD_BYTES // (case.n * case.k * size)))
    a = torch.randn(case.m, case.k, device="cuda").to(dtype)
    weights = [torch.randn(case.n, case.k, device="cuda").to(dtype) for _ in range(count)]
    right = [w.t() if case.columns else w.t().contiguous() for w in weights]
    outs = [torch.empty(case.m, case.n, dtype=dtype, device="cuda") for _ in range(count)]
    expected = [torch.empty_like(out) for out in outs]
    handles = [(shim.handle(out), shim.handle(a), shim.handle(b)) for out, b in zip(outs, right, strict=True)]
    gemm = shim.lib.aoti_torch_cuda_mm_out

    def ours() -> None:
        for out, left, b in handles:
            if gemm(out, left, b) != 0:
                shim.raise_on(1)

    def theirs() -> None:
        for out, b in zip(expected, right, strict=True):
            torch.mm(a, b, out=out)

    def host_seconds(run: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
        return best / count

    shim.use_torch_stream()
    ours(), theirs()
    torch.cuda.synchronize()
    torch.testing.assert_close(outs[0], expected[0], rtol=2e-2, atol=2e-2 * case.k**0.5)
    graphs = [captured(ours, torch), captured(theirs, torch)]
    times: list[list[float]] = [[], []]
    for graph in graphs:
        graph.replay()
    for _ in range(rounds):
        for graph, samples in zip(graphs, times, strict=True):
            samples.append(seconds_a_replay(graph, torch) / count)
    ours_seconds, torch_seconds = map(statistics.median, times)
    values = {
        "untorch_seconds": ours_seconds,
        "torch_seconds": torch_seconds,
        "untorch_host_seconds": host_seconds(ours),
        "torch_host_seconds": host_seconds(theirs),
        "bytes": float(size * (case.m * case.k + case.k * case.n + case.m * case.n)),
        "operations": 2.0 * case.m * case.n * case.k,
        "gemms_a_graph": float(count),
    }
    for triple in handles:
        for handle in triple:
            shim.delete(handle)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options = parser.parse_args()
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report("gpu_matmul", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    for dtype in options.dtypes:
        rows = []
        for case in CASES:
            values = measure(case, dtype, 5 if options.quick else 51)
            report.values.setdefault(dtype, {})[case.label()] = values
            ours, theirs = values["untorch_seconds"], values["torch_seconds"]
            rows.append([
                case.label(), f"{ours * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{theirs / ours:.2f}",
                f"{values['bytes'] / ours / 1e12:.2f}", f"{values['operations'] / ours / 1e12:.1f}",
                f"{values['untorch_host_seconds'] * 1e6:.1f}", f"{values['torch_host_seconds'] * 1e6:.1f}",
            ])  # fmt: skip
        columns = [
            "M×K · K×N",
            "untorch µs",
            "torch µs",
            "torch / untorch",
            "TB/s",
            "TFLOP/s",
            "host µs",
            "torch host µs",
        ]
        note = (
            f"{dtype}; medians of CUDA graph replays on {report.machine['gpu']}, weights from HBM. Host: time until a "
            "call from Python returns."
        )
        report.tables[f"gpu_matmul_{dtype}"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
