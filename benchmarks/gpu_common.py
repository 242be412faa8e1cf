"""What the GPU benchmarks share: packages for CUDA, the GPU's name, and processes that answer in JSON."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from common import WORK, Report

__all__ = ["PACKAGES", "answer", "child", "describe_gpu", "ensure", "note_of", "seconds_a_replay"]

PACKAGES = WORK / "gpu"
BATCH = 8


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
    """Of the GPU, for one replay of a captured torch graph. ``torch`` is the caller's: this file does without."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def note_of(report: Report, text: str) -> str:
    """A table's note with the GPU's name."""
    return f"{text} {report.machine['gpu']['name']}."


def ensure(name: str) -> pathlib.Path:
    """The package, compiled in a process of its own if it is not there: this one stays without torch."""
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
