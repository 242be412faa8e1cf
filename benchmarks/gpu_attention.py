"""How fast is attention on the GPU? Our operators and Triton kernels against torch's flash and cuDNN, in one run.

    UNTORCH_LIBRARY=build/py/native/libuntorch.so python benchmarks/gpu_attention.py [--quick]
    python benchmarks/gpu_attention_tune.py: block sizes, warps and stages for the Triton kernels

Prefill: as many keys as queries, in TFLOP/s (half of the operations when causal), by the operator of cuDNN's attention
without the log-sum-exp, which PyTorch does not ask cuDNN for without gradients either. Decode, by the flash operator:
one query over a long KV cache, 8 KV heads for 32 query heads, in GB/s of keys and values, which come from HBM: calls
cycle through more of them than L2 holds. "read" is one kernel that only reads and adds them. Each contestant's calls
are captured into a CUDA graph, which measures the GPU's time without launches; the graphs alternate, and the median of
the rounds counts.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import common

sys.path.insert(0, str(common.ROOT))

FLASH = "aoti_torch_cuda__scaled_dot_product_flash_attention"
CUDNN = "aoti_torch_cuda__scaled_dot_product_cudnn_attention"
LENGTHS = (512, 1024, 2048, 4096, 8192)
KEYS = ((1, 4096), (1, 16384), (1, 65536), (1, 131072), (4, 4096), (16, 4096), (4, 16384))  # batch, keys of each
CONTESTANTS = ("untorch", "untorch triton", "torch flash", "torch cuDNN", "read")
# Prefill of other shapes: batch, heads, length, width. An encoder of speech, of images, a short prompt, wide heads.
OTHERS = ((1, 20, 1500, 64), (1, 12, 197, 64), (1, 8, 128, 128), (4, 16, 4096, 96), (4, 8, 4096, 256))
TOKENS = 16384  # of a prefill: batch * length
COLD_BYTES = 200 << 20  # several times L2
READ_BLOCKS = (4096, 8192, 16384)  # elements per program of the read kernel


@dataclass(frozen=True)
class Case:
    """bfloat16 [batch, heads, length, width]."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    causal: bool

    @property
    def label(self) -> str:
        """A row's name."""
        if self.queries == 1:
            return f"decode {self.batch} × {self.keys} keys, D {self.width}"
        heads = "" if self.heads * self.width == 2048 else f"{self.heads} heads, "
        return f"prefill {self.batch}×{self.queries}, {heads}D {self.width}{', causal' if self.causal else ''}"

    @property
    def operations(self) -> float:
        """Multiplications and additions; the causal half alone where it is causal."""
        full = 4.0 * self.batch * self.heads * self.queries * self.keys * self.width
        return full / 2 if self.causal else full

    @property
    def bytes(self) -> float:
        """Of keys and values, read once."""
        return 2.0 * 2 * self.batch * self.kv_heads * self.keys * self.width


@dataclass
class Result:
    """Median seconds of a call of each contestant; ``None`` where torch has no kernel for it."""

    case: str
    operations: float
    bytes: float
    untorch_seconds: float
    untorch_triton_seconds: float
    torch_flash_seconds: float | None
    torch_cudnn_seconds: float | None
    read_seconds: float | None
    largest_difference: float


def cases(quick: bool) -> list[Case]:
    """Sixteen thousand tokens a prefill, a model width of 2048; then OTHERS; then decode."""
    prefill = [
        Case(TOKENS // length, 2048 // width, 2048 // width, length, length, width, causal)
        for width in (64, 128)
        for causal in (False, True)
        for length in (LENGTHS[1:4:2] if quick else LENGTHS)
    ]
    prefill += [
        Case(batch, heads, heads, length, length, width, causal)
        for batch, heads, length, width in (OTHERS[:1] if quick else OTHERS)
        for causal in ((False, True) if width > 64 and length > 128 else (False,))
    ]
    return prefill + [Case(batch, 32, 8, 1, keys, 128, False) for batch, keys in (KEYS[:1] if quick else KEYS)]


def measure(case: Case, rounds: int) -> Result:
    """All contestants on one case, alternating."""
    import torch
    from read_kernel import reader
    from torch.nn import attention, functional

    from tests.native import shim
    from untorch.ops.attention.launch import launch

    generator = torch.Generator(device="cuda").manual_seed(0)

    def tensor(heads: int, length: int) -> torch.Tensor:
        # As a model has them: heads split out of the projections.
        shape = (case.batch, length, heads, case.width)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    decode = case.queries == 1
    copies = math.ceil(COLD_BYTES / case.bytes) if decode else 1
    q = tensor(case.heads, case.queries)
    pairs = [(tensor(case.kv_heads, case.keys), tensor(case.kv_heads, case.keys)) for _ in range(copies)]
    handles = [[shim.handle(t) for t in (q, *pair)] for pair in pairs]
    calls = max(1, min(50, int(2e-3 / max(case.operations / 3e14, case.bytes / 2e12))))

    def ours(i: int, keep: list[torch.Tensor] | None = None) -> None:
        tensors, numbers = [ctypes.c_void_p() for _ in range(7)], [ctypes.c_int64() for _ in range(2)]
        slots = [*tensors[:4], *numbers, *tensors[4:]]
        no, causal, dropout = ctypes.c_int32(0), ctypes.c_int32(case.causal), ctypes.c_double(0.0)
        # The operator, and its arguments after q, k and v: bias and log-sum-exp, dropout, causal, debugging, scale
        name, flags = (FLASH, (dropout, causal, no, None)) if decode else (CUDNN, (None, no, dropout, causal, no, None))
        shim.raise_on(getattr(shim.lib, name)(*handles[i % copies], *flags, *map(ctypes.byref, slots)))
        if keep is not None:
            keep.append(shim.to_torch(tensors[0]))
        for h in tensors:
            shim.delete(h)

    def theirs(backend: attention.SDPBackend) -> Callable[[int], torch.Tensor]:
        def call(i: int) -> torch.Tensor:
            with attention.sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    q, *pairs[i % copies], is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
                )

        return call

    def graph(call: Callable[[int], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            shim.use_torch_stream()
            call(0)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="relaxed"):
            shim.use_torch_stream()
            for i in range(calls):
                call(i)
        shim.use_torch_stream()
        return captured

    shim.use_torch_stream()
    results: list[torch.Tensor] = []
    ours(0, results)
    contestants = {"untorch": graph(ours)}

    def triton(i: int) -> torch.Tensor:
        return launch(q, *pairs[i % copies], None, case.causal, None, lambda kernel: kernel)

    largest = float((triton(0).float() - results[0].float()).abs().max())
    contestants["triton"] = graph(triton)
    for name, backend in (
        ("flash", attention.SDPBackend.FLASH_ATTENTION),
        ("cudnn", attention.SDPBackend.CUDNN_ATTENTION),
    ):
        call = theirs(backend)
        try:
            largest = max(largest, float((call(0).float() - results[0].float()).abs().max()))
            contestants[name] = graph(call)
        except RuntimeError as error:
            print(f"{case.label}: torch {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    if decode:
        for block in READ_BLOCKS:
            contestants[f"read {block}"] = graph(reader(pairs, block))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, captured in contestants.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            captured.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / calls)
    for h in itertools.chain(*handles):
        shim.delete(h)
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    read = min((seconds[name] for name in seconds if name.startswith("read ")), default=None)
    return Result(
        case.label, case.operations, case.bytes, seconds["untorch"], seconds["triton"], seconds.get("flash"),
        seconds.get("cudnn"), read, largest,
    )  # fmt: skip


def main() -> None:
    options = common.arguments(__doc__)
    import torch

    report = common.Report("gpu_attention", options.quick)
    report.machine["gpu"] = torch.cuda.get_device_name()
    report.machine["cuda"] = torch.version.cuda
    report.machine["cudnn"] = torch.backends.cudnn.version()
    results = []
    for case in cases(options.quick):
        results.append(measure(case, 4 if options.quick else 15))
        torch.cuda.empty_cache()
    report.values["results"] = [asdict(result) for result in results]
    for name, unit, chosen in (
        ("prefill", "TFLOP/s", [r for r in results if r.case.startswith("prefill")]),
        ("decode", "GB/s", [r for r in results if r.case.startswith("decode")]),
    ):
        rows = []
        for r in chosen:
            work = r.operations / 1e12 if name == "prefill" else r.bytes / 1e9
            seconds = [r.untorch_seconds, r.untorch_triton_seconds, r.torch_flash_seconds, r.torch_cudnn_seconds]
            seconds += [r.read_seconds] if name == "decode" else []
            rates = ["–" if s is None else f"{work / s:.0f}" for s in seconds]
            rows.append([r.case, *rates, *("–" if s is None else f"{s * 1e6:.1f}" for s in seconds)])
        who = CONTESTANTS if name == "decode" else CONTESTANTS[:4]
        columns = ["case", *(f"{one} {unit}" for one in who), *(f"{one} µs" for one in who)]
        note = f"{report.machine['gpu']}, bfloat16; largest difference between results "
        note += f"{max((r.largest_difference for r in chosen), default=0.0):.4f}."
        report.tables[f"gpu_attention_{name}"] = common.Table(columns, rows, note)
    report.write(options.output)


if __name__ == "__main__":
    main()
