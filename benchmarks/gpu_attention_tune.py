"""Which block sizes, warps and stages are fastest for the Triton attention kernels on this GPU?

    python benchmarks/gpu_attention_tune.py [--dtype bfloat16] [--width 128] [--length 4096] [--causal] [--mask bool]
    python benchmarks/gpu_attention_tune.py --dtype float32 --width 64 --length 256 --batch 1 --heads 12
    python benchmarks/gpu_attention_tune.py --decode [--keys 65536] [--batch 1] [--mask bool]

Prints the best configurations of a case, for src/untorch/ops/attention/configs.py. Kernels are compiled by several
processes first, into Triton's cache; then CUDA graph replays of all alternate. Decode takes keys and values from HBM:
its calls cycle through more of them than L2 holds. Needs no libuntorch.so.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "src"))

TOKENS = 16384
COLD_BYTES = 200 << 20  # of keys and values: several times L2
SHARED_BYTES = 232448  # of a program, on compute capability 9.0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32"))
    found.add_argument("--width", type=int, default=128)
    found.add_argument("--length", type=int, default=4096, help="queries and keys of a prefill")
    found.add_argument("--causal", action="store_true")
    found.add_argument("--decode", action="store_true", help="one query over --keys keys, 32 heads over 8")
    found.add_argument("--keys", type=int, default=65536)
    found.add_argument("--batch", type=int, help="default: 16384 tokens of a prefill, one sequence in decode")
    found.add_argument("--heads", type=int, help="of a prefill; default: 2048 / width")
    found.add_argument("--mask", choices=("none", "bool", "additive"), default="none")
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    found.add_argument("--best", type=int, default=8, help="how many to print")
    return found


def configs(options: argparse.Namespace) -> list[Any]:
    """Configurations that may fit into shared memory and registers."""
    from untorch.ops.attention.configs import DecodeConfig, PrefillConfig, block_width

    size, width = (4 if options.dtype == "float32" else 2), block_width(options.width)
    found: list[Any] = []
    if options.decode:
        for n, warps, stages, programs in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4)):
            # The shared memory of the programs on an SM must fit; more in flight is of no use.
            if 2 * n * width * size * stages * programs <= SHARED_BYTES and n * width * size >= 4096 * warps // 4:
                found.append(DecodeConfig(n, warps, stages, programs))
        return found
    small = size == 4  # these blocks are no WGMMA's
    blocks, warp_counts = ((16, 32, 64, 128), (2, 4, 8)) if small else ((64, 128, 256), (4, 8, 16))
    for m, n, warps, stages in itertools.product(blocks, (16, 32, 64, 128, 256), warp_counts, (1, 2, 3, 4)):
        per_thread = m * (n * 1.5 + width) / (32 * warps)
        shared = size * width * (m + 2 * n * stages)
        fits = (10 if small else 24) <= per_thread <= 210 and shared <= SHARED_BYTES * 1.2
        if fits and (small or (n >= 32 and 16 * warps <= 2 * m)):
            found.append(PrefillConfig(m, n, warps, stages))
    return found


def tensors(options: argparse.Namespace) -> tuple[Any, ...]:
    import torch

    dtype = getattr(torch, options.dtype)
    heads, heads_kv = (32, 8) if options.decode else (options.heads or max(1, 2048 // options.width),) * 2
    queries, keys = (1, options.keys) if options.decode else (options.length, options.length)
    batch = options.batch or (1 if options.decode else max(1, TOKENS // options.length))

    def tensor(count: int, length: int) -> Any:
        return torch.randn((batch, length, count, options.width), device="cuda", dtype=dtype).transpose(1, 2)

    mask = None
    if options.mask != "none":
        mask = torch.ones((batch, 1, queries, keys), dtype=torch.bool, device="cuda")
    if options.mask == "additive":
        mask = torch.zeros((batch, 1, queries, keys), dtype=dtype, device="cuda")
    return tensor(heads, queries), tensor(heads_kv, keys), tensor(heads_kv, keys), mask


def run(options: argparse.Namespace, config: Any, arguments: tuple[Any, ...]) -> Any:
    import torch

    from untorch.ops.attention.launch import launch_decode, launch_prefill

    def same(kernel: Any) -> Any:
        return kernel

    if options.decode:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        return launch_decode(*arguments, None, config, processors, same)
    return launch_prefill(*arguments, options.causal, None, config, same)


def compile_some(options: argparse.Namespace, part: list[Any]) -> None:
    """In a process of its own: one launch puts a kernel into the cache."""
    arguments = tensors(options)
    for config in part:
        try:
            run(options, config, arguments)
        except Exception:  # reported when it is measured
            continue


def measure(options: argparse.Namespace, found: list[Any]) -> tuple[dict[Any, float], dict[Any, str]]:
    """Median seconds of a call by configuration, and why others did not run."""
    import torch

    arguments = tensors(options)
    q, k, v, mask = arguments
    nbytes = 2 * k.numel() * k.element_size()
    copies = math.ceil(COLD_BYTES / nbytes) if options.decode else 1
    turns = [arguments, *((q, k.clone(), v.clone(), mask) for _ in range(copies - 1))]
    with torch.no_grad():
        group = q.shape[1] // k.shape[1]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(t[:1] for t in (q, k, v)), is_causal=options.causal, enable_gqa=group > 1
        ).float()
    tolerance = 2e-2 if options.dtype == "bfloat16" else 4e-3 if options.dtype == "float16" else 1e-4
    graphs, failed = {}, {}
    stream = torch.cuda.Stream()
    for config in found:
        try:
            difference = float((run(options, config, arguments)[:1].float() - expected).abs().max())
            if not difference < tolerance:
                failed[config] = f"wrong by {difference:.2g}"
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run(options, config, arguments)
            end.record()
            end.synchronize()
            calls = max(copies, min(20, int(1.5 / begin.elapsed_time(end))))
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(calls):
                    run(options, config, turns[i % copies])
            graphs[config] = graph, calls
        except Exception as error:
            failed[config] = (str(error).splitlines() or [type(error).__name__])[0]
    times: dict[Any, list[float]] = {config: [] for config in graphs}
    for _ in range(options.rounds):
        for config, (graph, calls) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[config].append(begin.elapsed_time(end) / 1e3 / calls)
    return {config: statistics.median(values[1:]) for config, values in times.items()}, failed


def main() -> None:
    options = parser().parse_args()
    found = configs(options)
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    parts = [found[i :: options.processes] for i in range(options.processes)]
    workers = [context.Process(target=compile_some, args=(options, part)) for part in parts if part]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    compiled = time.monotonic()
    seconds, failed = measure(options, found)
    arguments = tensors(options)
    (batch, heads, queries, width), (_, heads_kv, keys, _) = arguments[0].shape, arguments[1].shape
    operations = 4.0 * batch * heads * queries * keys * width / (2 if options.causal else 1)
    nbytes = 2.0 * batch * heads_kv * keys * width * arguments[1].element_size()
    print(
        f"{options.dtype}, D {width}, {batch}×{heads}/{heads_kv}×{queries} queries, {keys} keys"
        f"{', causal' if options.causal else ''}, mask {options.mask}: {len(seconds)} of {len(found)} ran; compiled in "
        f"{compiled - started:.0f} s, measured in {time.monotonic() - compiled:.0f} s"
    )
    for config, value in sorted(seconds.items(), key=lambda item: item[1])[: options.best]:
        rate = f"{nbytes / value / 1e9:.0f} GB/s" if options.decode else f"{operations / value / 1e12:.0f} TFLOP/s"
        print(f"{value * 1e6:9.1f} µs {rate:>14}  {config}")
    reasons = sorted({reason[:160] for reason in failed.values()})
    for reason in reasons[:4]:
        print(f"failed: {sum(r[:160] == reason for r in failed.values())} × {reason}")


if __name__ == "__main__":
    main()
