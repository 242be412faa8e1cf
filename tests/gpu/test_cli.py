"""The commands on packages for GPUs, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.gpu.models import close, reference


def untorch(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "untorch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def document(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(untorch(*arguments, "--json").stdout)
    return found


def test_run(mlp: tuple[Path, nn.Module], tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    untorch("run", mlp[0], "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "out")
    [made] = (tmp_path / "out").glob("*.npy")
    close(np.load(made), reference(mlp[1], x))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--cuda-graph",),
        ("--cuda-graphs", 2),
        ("--concurrency", 4, "--num-runners", 2),
        ("--cold", "--cold-runs", 1),
    ],
    ids=lambda options: " ".join(map(str, options)) or "none",
)
def test_bench(mlp: tuple[Path, nn.Module], options: tuple[object, ...]) -> None:
    found = document("bench", mlp[0], "--dim", "batch=8", "--seconds", 0.2, *options)
    assert found["device"].startswith("cuda") and found["graph"] == ("--cuda-graph" in options)
    assert all(result["p50_s"] > 0 for result in found["results"])


def test_inspect_verify_and_doctor(mlp: tuple[Path, nn.Module]) -> None:
    [method] = document("inspect", mlp[0])["methods"]
    assert method["device"].startswith("cuda") and method["runs_here"]
    untorch("verify", mlp[0])
    assert document("doctor")["cuda"]["served"]


def test_a_gpu_that_is_not_there(mlp: tuple[Path, nn.Module]) -> None:
    done = untorch("run", mlp[0], "--input", "random", "--device", "cuda:63", code=1)
    assert "cuda:63" in done.stderr and "Traceback" not in done.stderr
