"""How fast are GEMM and attention on the CPU? Prepacked linear layers and attention against torch, in GFLOP/s.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/cpu_gemm.py [--threads 1 2] [--quick]

Calls the C shims through ctypes, so that only the kernel and its allocation are timed. Both sides alternate, and the
best of many repetitions counts. "warm" repeats one weight, which stays in L2; "cold" cycles through 96 MiB of weights,
as a model does. CPU time stands beside wall-clock time: it stays comparable on a shared machine.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "cpu_gemm"
COLD_BYTES = 96 << 20
LINEAR = "aoti_torch_cpu_untorch_packed_linear"
ATTENTION = "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Case:
    """x [m, k] times a weight [n, k]."""

    m: int
    n: int
    k: int
    activation: str = "none"
    residual: bool = False
    cold: bool = False


@dataclass
class Result:
    """Seconds of the best repetition, and GFLOP/s of wall-clock time."""

    case: str
    threads: int
    untorch_seconds: float
    untorch_cpu_seconds: float
    torch_seconds: float
    torch_cpu_seconds: float
    untorch_gflops: float
    torch_gflops: float


# MiniLM's layers for 1×32, 1×128 and 16×128 tokens, and a tiny MLP's.
CASES = [
    Case(8, 256, 64, "relu"),
    Case(32, 384, 384),
    Case(32, 1536, 384, cold=True),
    Case(32, 384, 1536, cold=True),
    Case(128, 1536, 384, cold=True),
    Case(2048, 384, 384, residual=True),
    Case(2048, 1536, 384, "gelu"),
    Case(2048, 384, 1536, residual=True),
]
ATTENTION_CASES = [(1, 12, 32, 32), (1, 12, 128, 32), (16, 12, 128, 32)]


def alternate(first: Callable[[], None], second: Callable[[], None], seconds: float) -> list[tuple[float, float]]:
    """Best (wall, CPU of the process) of each, alternating."""
    best = [(float("inf"), float("inf"))] * 2
    for function in (first, second):
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate((first, second)):
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best[i] = (min(best[i][0], wall), min(best[i][1], cpu))
    return best


def measure(threads: int, seconds: float) -> list[Result]:
    """All cases in this process, with this number of threads (OMP_NUM_THREADS is set before)."""
    sys.path.insert(0, str(ROOT / "tests" / "native"))
    import shim
    import torch
    import torch.nn.functional as functional

    torch.set_num_threads(threads)
    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": torch.relu, "gelu": functional.gelu}
    results = []

    def pack(weight: torch.Tensor) -> torch.Tensor:
        blocks = -(-weight.shape[0] // 16)
        padded = weight.new_zeros((blocks * 16, weight.shape[1]))
        padded[: weight.shape[0]] = weight
        return padded.reshape(blocks, 16, -1).transpose(1, 2).contiguous()

    def add(name: str, operations: float, ours: Callable[[], None], theirs: Callable[[], None]) -> None:
        (wall, cpu), (torch_wall, torch_cpu) = alternate(ours, theirs, seconds)
        rates = operations / wall / 1e9, operations / torch_wall / 1e9
        results.append(Result(name, threads, wall, cpu, torch_wall, torch_cpu, *rates))

    for case in CASES:
        count = max(COLD_BYTES // (4 * case.n * case.k), 1) if case.cold else 1
        x, bias = torch.randn(case.m, case.k), torch.randn(case.n)
        rest = torch.randn(case.m, case.n)
        plain = [torch.randn(case.n, case.k) for _ in range(count)]
        packed = [pack(weight) for weight in plain]
        handles = [shim.handle(tensor) for tensor in (x, bias, rest)]
        weights = [shim.handle(tensor) for tensor in packed]

        def ours(
            case: Case = case, handles: list[ctypes.c_void_p] = handles, weights: list[ctypes.c_void_p] = weights
        ) -> None:
            out = ctypes.c_void_p()
            residual = ctypes.byref(handles[2]) if case.residual else None
            for weight in weights:
                code = getattr(shim.lib, LINEAR)(
                    handles[0], weight, ctypes.byref(handles[1]), residual, case.activation.encode(),
                    ctypes.c_int64(case.n), ctypes.byref(out),
                )  # fmt: skip
                shim.raise_on(code)
                shim.delete(out)

        def theirs(
            case: Case = case, x: torch.Tensor = x, bias: torch.Tensor = bias, rest: torch.Tensor = rest,
            plain: list[torch.Tensor] = plain,
        ) -> None:  # fmt: skip
            for weight in plain:
                y = torch.addmm(bias, x, weight.t())
                if case.activation != "none":
                    y = activations[case.activation](y)
                if case.residual:
                    y += rest

        name = f"{case.m}×{case.k} → {case.n}"
        name += f" {case.activation}" if case.activation != "none" else ""
        name += " + residual" if case.residual else ""
        name += " (cold)" if case.cold else ""
        add(name, 2.0 * case.m * case.n * case.k * count, ours, theirs)
        for handle in (*handles, *weights):
            shim.delete(handle)

    for batch, heads, length, width in ATTENTION_CASES:
        # As a model has them: heads split out of the projections, not copied.
        tensors = [torch.randn(batch, length, heads, width).transpose(1, 2) for _ in range(3)]
        tensors.append(torch.zeros(batch, 1, 1, length).expand(batch, 1, length, length))
        handles = [shim.handle(tensor) for tensor in tensors]

        def ours_attention(handles: list[ctypes.c_void_p] = handles) -> None:
            out, lse = ctypes.c_void_p(), ctypes.c_void_p()
            code = getattr(shim.lib, ATTENTION)(
                *handles[:3], ctypes.c_double(0.0), ctypes.c_int32(0), ctypes.byref(handles[3]), None,
                ctypes.byref(out), ctypes.byref(lse),
            )  # fmt: skip
            shim.raise_on(code)
            shim.delete(out)
            shim.delete(lse)

        def theirs_attention(tensors: list[torch.Tensor] = tensors) -> None:
            functional.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3])

        operations = 4.0 * batch * heads * length * length * width
        add(f"attention {batch}×{heads}×{length}×{width}", operations, ours_attention, theirs_attention)
        for handle in handles:
            shim.delete(handle)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    options = parser.parse_args()
    folder = options.output or ROOT / ("build/bench/results" if options.quick else "benchmarks/results")
    load = list(os.getloadavg())
    results: list[Result] = []
    for threads in sorted(set(options.threads)):
        # A process per thread count: OpenMP reads it at start.
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.environ["OMP_NUM_THREADS"] = str(threads)
            with os.fdopen(writer, "w") as pipe:
                json.dump([asdict(r) for r in measure(threads, 0.1 if options.quick else 2.0)], pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        if not text:
            raise SystemExit(1)
        results += [Result(**item) for item in json.loads(text)]

    columns = ["case", "threads", "untorch GFLOP/s", "torch GFLOP/s", "untorch ms", "torch ms", "CPU ms", "torch CPU"]
    rows = [
        [
            r.case, str(r.threads), f"{r.untorch_gflops:.0f}", f"{r.torch_gflops:.0f}",
            f"{r.untorch_seconds * 1e3:.3f}", f"{r.torch_seconds * 1e3:.3f}",
            f"{r.untorch_cpu_seconds * 1e3:.3f}", f"{r.torch_cpu_seconds * 1e3:.3f}",
        ]
        for r in results
    ]  # fmt: skip
    machine = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": load,
    }
    document = {
        "benchmark": NAME, "script": f"benchmarks/{NAME}.py", "quick": options.quick, "machine": machine,
        "values": {"results": [asdict(r) for r in results]},
        "tables": {"cpu_gemm": {"columns": columns, "rows": rows, "note": ""}},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print(row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)), sep="  ")
    print(f"load before: {load[0]:.1f}; written: {path}")


if __name__ == "__main__":
    main()
