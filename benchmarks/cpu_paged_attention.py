"""How long does the attention of a decoding step take on the CPU, by what the pages hold? One sequence, one new token.

    UNTORCH_LIBRARY=build/dev/native/libuntorch.so python benchmarks/cpu_paged_attention.py [--quick]

32 heads over 8 KV heads of width 128, 4,096 positions in shuffled pages of 16. Calls the C shim through ctypes. Formats
alternate, so that none finds its pages in a cache. The time is the median's; the best stands beside it for shared
machines.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import time
from typing import Any

from common import ROOT, Report, Table, arguments

NAME = "cpu_paged_attention"
HEADS, HEADS_KV, WIDTH, LENGTH, BLOCK = 32, 8, 128, 4096, 16
# By name: dtypes of the model and of the pool.
FORMATS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("bfloat16", "int8"),
    "FP8": ("bfloat16", "float8_e4m3fn"),
}


def make(model_dtype: str, pool_dtype: str) -> list[Any]:
    """The shim's arguments."""
    import torch
    from shim import Opt

    from untorch.ops.kv_pages import Pages, block_elements

    torch.manual_seed(0)
    dtype, kv = getattr(torch, model_dtype), getattr(torch, pool_dtype)
    blocks = LENGTH // BLOCK
    pool = torch.zeros(blocks, block_elements(kv, HEADS_KV, BLOCK, WIDTH, WIDTH)).to(kv)
    page, place = torch.arange(blocks).repeat_interleave(BLOCK), torch.arange(BLOCK).repeat(blocks)
    rows = [torch.randn(LENGTH, HEADS_KV, WIDTH).to(dtype) for _ in range(2)]
    Pages(pool, 0, BLOCK, HEADS_KV, WIDTH, WIDTH).write(page, place, *rows)
    table = torch.randperm(blocks).to(torch.int32)[None]
    return [
        torch.randn(1, HEADS, WIDTH).to(dtype), Opt(rows[0][:1]), Opt(rows[1][:1]), pool, table,
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32),
        torch.tensor([int(table[0, -1]) * BLOCK + BLOCK - 1]), Opt(None), Opt(None), 0, BLOCK, HEADS_KV, WIDTH, WIDTH,
        WIDTH**-0.5, 0, 0, 0.0,
    ]  # fmt: skip


def measure(threads: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each call, by format."""
    import shim

    shim.lib.utp_set_num_threads(threads)
    given = {name: make(*dtypes) for name, dtypes in FORMATS.items()}
    times: dict[str, list[float]] = {name: [] for name in given}
    for repetition in range(repetitions + 3):
        for name, values in given.items():
            start = time.perf_counter()
            shim.call("aoti_torch_cpu_paged_attention", *values, returns=1)
            if repetition >= 3:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests" / "native"), str(pathlib.Path(ROOT, "src"))]
    options = arguments(__doc__)
    report = Report(NAME, options.quick)
    counts = sorted({1, len(os.sched_getaffinity(0))})
    rows = []
    for threads in counts:
        times = measure(threads, 5 if options.quick else 200)
        report.values[str(threads)] = times
        for name, seconds in times.items():
            _, pool_dtype = FORMATS[name]
            size = {"float32": 4 * WIDTH, "bfloat16": 2 * WIDTH}.get(pool_dtype, WIDTH + 2)
            total = 2 * HEADS_KV * LENGTH * size
            median = statistics.median(seconds)
            rows.append([
                name, str(threads), f"{total / 2**20:.1f}", f"{median * 1e3:.2f}", f"{min(seconds) * 1e3:.2f}",
                f"{total / median / 1e9:.1f}",
            ])  # fmt: skip
    columns = ["pages", "threads", "MiB", "ms", "best ms", "GB/s"]
    report.tables[NAME] = Table(columns, rows)
    report.write(options.output)


if __name__ == "__main__":
    main()
