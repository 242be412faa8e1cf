"""A device-side assertion: one error that names the kernel, and a process that goes on without the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from untorch.export import export

SCRIPT = """
import json, sys
import numpy as np
import untorch
gpu, cpu = untorch.load(sys.argv[1]), untorch.load(sys.argv[2])
good, bad = np.full((4, 16), 99, np.int64), np.full((4, 16), 100, np.int64)
found = {"good": np.asarray(gpu(good)).tolist(), "texts": []}
for ids in (bad, good):
    try:
        gpu(ids)
        found["texts"].append("no error")
    except untorch.DeviceLostError as error:
        found["texts"].append(str(error))
try:
    untorch.load(sys.argv[1])(good)
except untorch.DeviceLostError as error:
    found["texts"].append(str(error))
found["cpu"] = np.asarray(cpu(good)).tolist()
gpu.close()
print(json.dumps(found))
"""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(100, 64), nn.Linear(64, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).relu()


@pytest.mark.parametrize("stock", [False, True], ids=["own", "stock"])
def test_an_index_out_of_range(tmp_path: Path, stock: bool) -> None:
    torch.manual_seed(0)
    module, ids = Words().eval(), torch.randint(0, 100, (4, 16))
    expected = module(torch.full((4, 16), 99)).tolist()
    gpu, cpu = tmp_path / "gpu.pt2", tmp_path / "cpu.pt2"
    export(module, (ids,), cpu, device="cpu", progress=False)
    if stock:
        program = torch.export.export(module.cuda(), (ids.cuda(),))
        torch._inductor.aoti_compile_and_package(program, package_path=str(gpu))
    else:
        export(module, (ids,), gpu, device="cuda", progress=False)
    command = [sys.executable, "-c", SCRIPT, str(gpu), str(cpu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first = found["texts"][0]
    assert found["texts"] == [first] * 3
    assert "CUDA_ERROR_ASSERT" in first and "embedding" in first and "out of bounds: 0 <= " in first
    assert torch.allclose(torch.tensor(found["good"]), torch.tensor(expected), atol=1e-5)
    assert torch.allclose(torch.tensor(found["cpu"]), torch.tensor(expected), atol=1e-5)
