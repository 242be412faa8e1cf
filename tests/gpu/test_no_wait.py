"""Entry points return while a kernel spins on another stream, also when they are the first of their kind.

Two wait, as docs/runtime.md says: a method's first call, and close().

Each runs in a process of its own (no_wait.py), where nothing but what its case says was loaded before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.models import exported

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH = 4096, 64


class Cache(nn.Module):
    """1 MiB that does not begin with zeros."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("rows", torch.full((ROWS, WIDTH), 0.25))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))


class Put(Cache):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.filled.clone()
        self.rows.index_copy_(0, self.filled.reshape(1) % ROWS, (x @ self.weight)[None])
        self.filled += 1
        return before


class Get(Cache):
    def forward(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows * scale, self.filled + 0


@pytest.fixture(scope="module")
def cache(folder: Path) -> Path:
    return exported(folder, "no_wait", {"put": (Put(), (torch.ones(WIDTH),)), "get": (Get(), (torch.ones(()),))}, None)


@pytest.mark.parametrize(
    "entry",
    [
        "load", "call", "call with a numpy array", "first output copy", "session", "first call of a session", "fork",
        "fork of a busy session", "first call of a fork", "reset", "reset of a busy session", "graph",
        "graph of a busy session", "first replay", "replay of a busy session", "replay with a copied input",
        "replay with a numpy array", "DLPack",
    ],
)  # fmt: skip
def test_it_returns_while_another_stream_is_busy(cache: Path, entry: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("no_wait.py")), str(cache), entry]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["running"], f"{entry}: {done.stdout}"
