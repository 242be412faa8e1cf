"""How fast do prompts attend over a paged KV cache? The whole operator with its WGMMA kernel and with Triton's alone.

    UNTORCH_LIBRARY=build/gpu/native/libuntorch.so python benchmarks/gpu_paged_attention.py [--quick]

A call writes keys and values to their pages, in shuffled order, and attends; both forms of the operator launch the same
other kernels. cuDNN, by torch, has the same sequences without pages, where they are of one length and begin at 0: it
writes nothing. TFLOP/s count the keys that a token sees. CUDA graphs, which alternate; medians.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from common import ROOT, Report, Table, arguments
from gpu_common import seconds_alternating

sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Case:
    """Sequences of (tokens in this step, keys), bfloat16."""

    lengths: list[tuple[int, int]]
    heads: int = 32
    heads_kv: int = 8
    width: int = 128
    block: int = 16
    window: int = 0

    @property
    def label(self) -> str:
        """A row's name."""
        tokens, keys = self.lengths[-1]
        count = len(self.lengths)
        text = f"{count} × {tokens}" if len(set(self.lengths)) == 1 else f"{count} sequences, one of {tokens}"
        text += f" of {keys} keys" if keys != tokens else ""
        text += f", {self.heads} heads over {self.heads_kv}, D {self.width}"
        text += f", window {self.window}" if self.window else ""
        return text + (f", pages of {self.block}" if self.block != 16 else "")

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        seen = 0
        for tokens, keys in self.lengths:
            counts = range(keys - tokens + 1, keys + 1)
            seen += sum(min(n, self.window) for n in counts) if self.window else sum(counts)
        return 4.0 * seen * self.width * self.heads


CASES = (
    Case([(2048, 2048)]),
    Case([(2048, 2048)], block=128),
    Case([(8192, 8192)]),
    Case([(2048, 8192)]),
    Case([(2048, 32768)]),
    Case([(512, 512)] * 8),
    Case([(128, 128)] * 16),
    Case([(32, 1000)] * 16),
    Case([(256, 4096)] * 8),
    Case([(1, 4000)] * 64 + [(1500, 1500)]),
    Case([(2048, 2048)], heads=28, heads_kv=4),
    Case([(2048, 2048)], width=64),
    Case([(512, 512)] * 8, width=64),
    Case([(4096, 4096)], heads=64, width=64, window=1024),
    Case([(4096, 4096)], heads=16, width=256),
    Case([(2048, 2048)], heads_kv=32, width=96),
)


def batch_of(case: Case) -> dict[str, Any]:
    """The operator's arguments, on the GPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    needed = [-(-keys // case.block) for _, keys in case.lengths]
    free = torch.randperm(sum(needed), generator=generator).split(needed)
    tokens = sum(count for count, _ in case.lengths)
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    slots, ends = [], [0]
    for s, (count, keys) in enumerate(case.lengths):
        table[s, : needed[s]] = free[s]
        positions = torch.arange(keys - count, keys)
        slots.append(free[s][positions // case.block] * case.block + positions % case.block)
        ends.append(ends[-1] + count)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    given = {
        "q": random(tokens, case.heads, case.width), "k": random(tokens, case.heads_kv, case.width),
        "v": random(tokens, case.heads_kv, case.width),
        "pool": random(sum(needed), 2 * case.heads_kv * case.block * case.width), "block_table": table,
        "cu_seqlens_q": torch.tensor(ends, dtype=torch.int32),
        "seqlens_k": torch.tensor([keys for _, keys in case.lengths], dtype=torch.int32),
        "slot_mapping": torch.cat(slots), "sinks": None, "alibi": None, "offset": torch.tensor([0]), "aligned": True,
        "wgmma": True, "block": case.block, "heads_kv": case.heads_kv, "width": case.width, "width_v": case.width,
        "scale": case.width**-0.5, "window": case.window, "chunk": 0, "softcap": 0.0,
    }  # fmt: skip
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of each contestant, and the largest difference between results."""
    import torch
    from torch.nn import attention, functional

    from untorch.ops.attention.paged_operator import paged_attention_triton

    given = batch_of(case)
    forms = {"untorch": given, "triton": given | {"wgmma": False}}
    results = [paged_attention_triton(**form) for form in forms.values()]
    difference = float((results[0].float() - results[1].float()).abs().max())
    calls = max(1, min(20, int(3e14 * 2e-3 / case.operations)))

    def repeated(call: Any) -> tuple[Any, int]:
        return (lambda: [call() for _ in range(calls)]), calls

    runs = {name: repeated(lambda form=form: paged_attention_triton(**form)) for name, form in forms.items()}
    count, keys = case.lengths[0]
    if len(set(case.lengths)) == 1 and count == keys and not case.window:

        def heads(name: str) -> torch.Tensor:
            return given[name].unflatten(0, (-1, keys)).transpose(1, 2)

        q, k, v = (heads(name) for name in ("q", "k", "v"))

        def dense() -> torch.Tensor:
            with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        difference = max(difference, float((dense().transpose(1, 2).flatten(0, 1) - results[0]).abs().max()))
        runs["cudnn"] = repeated(dense)
    seconds = seconds_alternating(runs, rounds, torch)
    return {f"{name}_seconds": value for name, value in seconds.items()} | {
        "operations": case.operations, "largest_difference": difference,
    }  # fmt: skip


def main() -> None:
    options = arguments(__doc__)
    import torch

    report = Report("gpu_paged_attention", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    report.machine["cudnn"] = torch.backends.cudnn.version()
    rows = []
    for case in CASES[:2] if options.quick else CASES:
        found = report.values[case.label] = measure(case, 4 if options.quick else 21)
        torch.cuda.empty_cache()
        times = [found.get(f"{name}_seconds") for name in ("untorch", "triton", "cudnn")]
        rates = ["–" if time is None else f"{case.operations / time / 1e12:.0f}" for time in times]
        rows.append([
            case.label, *rates, *("–" if time is None else f"{time * 1e6:.1f}" for time in times),
            f"{found['triton_seconds'] / found['untorch_seconds']:.2f}",
        ])  # fmt: skip
    who = ("untorch", "Triton", "cuDNN, no pages")
    columns = ["step", *(f"{one} TFLOP/s" for one in who), *(f"{one} µs" for one in who), "Triton : untorch"]
    largest = max(found["largest_difference"] for found in report.values.values())
    note = f"{report.machine['gpu']}, bfloat16, the whole operator; largest difference between results {largest:.4f}."
    report.tables["gpu_paged_attention"] = Table(columns, rows, note)
    report.write(options.output)


if __name__ == "__main__":
    main()
