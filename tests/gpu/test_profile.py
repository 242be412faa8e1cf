"""Profiles on a GPU: kernels by the GPU's own clock, called and in a graph, and the roofline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from untorch.profiler import measure_roofline, profile


def test_roofline() -> None:
    limits = measure_roofline("cuda:0")
    assert limits.dtype == "bfloat16"
    assert limits.bytes_per_second > 1e9 and limits.operations_per_second > 1e9


@pytest.mark.parametrize("graph", [False, True], ids=["called", "graph"])
def test_rows_have_the_gpus_times(mlp: tuple[Path, nn.Module], graph: bool) -> None:
    found = profile(mlp[0], [np.ones((512, 64), np.float32)], runs=4, warmup=2, graph=graph)
    assert found.device.startswith("cuda") and found.graph == graph and found.roofline is not None
    rows = [row for row in found.rows if row.kind != "other"]
    assert sum(row.calls for row in rows) >= 2  # at least the two linear layers
    assert sum(row.seconds for row in rows) > 0
    assert all(row.host_seconds is not None for row in rows)
    assert any(row.lines and row.nbytes for row in rows) and found.matched
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert found.seconds > 0 and found.wall_seconds > 0
    events = found.trace()["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert found.device in processes.values()
    on_gpu = [event for event in events if event["ph"] == "X" and processes[event["pid"]] == found.device]
    assert len(on_gpu) >= 4 * 2 and all(event["dur"] >= 0 for event in on_gpu)


def test_the_command(mlp: tuple[Path, nn.Module], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "untorch", "profile", str(mlp[0]), "--dim", "batch=64", "--runs", "3"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "trace.json")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "GPU idle" in done.stdout and "measured here" in done.stdout
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
