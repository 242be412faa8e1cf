"""What the GPU benchmarks share: packages for CUDA, the GPU's name, and processes that answer in JSON."""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from common import WORK, Report

__all__ = [
    "COLD_BYTES", "PACKAGES", "answer", "captured", "child", "describe_gpu", "ensure", "memory_bandwidth",
    "note_of", "random_language_model", "seconds_a_replay", "seconds_alternating",
]  # fmt: skip

PACKAGES = WORK / "gpu"
BATCH = 8
COLD_BYTES = 192 << 20  # of weights: more than twice the L2 of the largest GPUs


def describe_gpu(report: Report) -> str:
    """Puts GPU and driver into the report's machine; gives the GPU's name."""
    import untorch

    found = json.loads(untorch._core.cuda_devices())
    if "error" in found or not found["devices"]:
        raise SystemExit(f"no GPU: {found.get('error', 'the driver knows none')}")
    report.machine["gpu"] = found["devices"][0]
    report.machine["driver"] = found["driver"]
    return str(found["devices"][0]["name"])


def seconds_a_replay(graph: Any, torch: Any) -> float:
    """Seconds of the GPU for one replay of a captured torch graph. This file does not import torch: the caller does."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(run: Callable[[], None], torch: Any) -> Any:
    """A CUDA graph of what ``run`` enqueues. C functions of libuntorch.so enqueue on the captured stream too."""
    from tests.native import shim

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        shim.use_torch_stream()
        run()
    shim.use_torch_stream()
    return graph


def memory_bandwidth(name: str) -> float:
    """Bytes a second by the data sheet of the GPU with that name ("NVIDIA H200"); NaN if it is not known.

    A copy does not measure it: in a graph a copy is no kernel and runs at 2.7 TB/s on an H200, where kernels read 4.5.
    """
    from untorch.export.gpus import find_gpu
    from untorch.runtime.errors import InvalidArgumentError

    model = name.removeprefix("NVIDIA ")
    for known in (model, model.split()[0]):  # "H100 80GB HBM3" is an H100
        try:
            return find_gpu(known).bandwidth * 1e9
        except InvalidArgumentError:
            continue
    return math.nan


def seconds_alternating(runs: dict[str, tuple[Callable[[], None], int]], rounds: int, torch: Any) -> dict[str, float]:
    """Seconds of the GPU for one call of each run: a function, and the number of calls that it enqueues.

    Medians of ``rounds`` replays of CUDA graphs, which alternate.
    """
    for run, _ in runs.values():
        run()
    torch.cuda.synchronize()
    graphs = {name: captured(run, torch) for name, (run, _) in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(seconds_a_replay(graph, torch) / runs[name][1])
    return {name: statistics.median(samples) for name, samples in times.items()}


def note_of(report: Report, text: str) -> str:
    """A table's note with the GPU's name."""
    return f"{text} {report.machine['gpu']['name']}."


def random_language_model(kind: str, sizes: Mapping[str, Any]) -> Any:
    """A causal language model of transformers, in bfloat16.

    Weights repeat one random block, which is quicker than drawing billions of numbers. Each begins at another
    place of it: equal weights would be stored once.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    model.tie_weights()
    block = torch.randn(1 << 22).mul_(0.02).to(torch.bfloat16)
    for number, parameter in enumerate(model.parameters()):
        flat, block = parameter.data.view(-1), block.roll(4099 + number)
        for begin in range(0, flat.numel(), len(block)):
            part = flat[begin : begin + len(block)]
            part.copy_(block[: len(part)])
        if parameter.dim() == 1:
            parameter.data.fill_(1)
    rotary = model.model.rotary_emb
    rotary.inv_freq, _ = rotary.compute_default_rope_parameters(config)
    rotary.original_inv_freq = rotary.inv_freq
    return model.eval()


def ensure(name: str) -> pathlib.Path:
    """The package. If it is missing, a process of its own compiles it: this one does not import torch."""
    path = PACKAGES / f"{name}.pt2"
    if not path.exists():
        subprocess.run([sys.executable, __file__, name], check=True)
    return path


def child(script: str, request: dict[str, Any]) -> dict[str, Any]:
    """What ``script --child REQUEST`` prints in its last line; "started" is the clock before the process was."""
    started = time.clock_gettime(time.CLOCK_MONOTONIC)
    command = [sys.executable, script, "--child", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=dict(os.environ))
    if done.returncode != 0:
        raise SystemExit(f"{request}: its process ended with exit code {done.returncode}")
    return {"started": started, **json.loads(done.stdout.splitlines()[-1])}


def answer(**values: Any) -> None:
    """A child's last line."""
    sys.stdout.write("\n" + json.dumps(values) + "\n")


def build(name: str) -> None:
    import torch
    from torch import nn

    from untorch.export import export

    PACKAGES.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    path = PACKAGES / f"{name}.pt2"
    kind, _, size = name.partition("_")
    if kind == "weights":

        class Weights(nn.Module):
            """As many random weights as were asked for (GiB), of which a call reads a few rows of each matrix."""

            def __init__(self, gib: int) -> None:
                super().__init__()
                shape = (1 << 14, 1 << 14)  # 1 GiB of float32
                self.parts = nn.ParameterList(
                    nn.Parameter(torch.randn(shape, device="cuda"), requires_grad=False) for _ in range(gib)
                )

            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return torch.stack([part[rows].sum() for part in self.parts])

        export(Weights(int(size)), (torch.arange(4, device="cuda"),), path, device="cuda", progress=False)
        return
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval().cuda()
    args = (torch.randn(BATCH, 64, device="cuda"),)
    if name == "mlp":
        export(model, args, path, device="cuda", progress=False)
    elif name == "mlp_stock":
        with torch.no_grad():
            program = torch.export.export(model, args)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    else:
        raise SystemExit(f"there is no model {name}")


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        build(wanted)
