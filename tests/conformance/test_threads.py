"""One exported dynamic model under many threads and many calls: right results, and memory that does not grow."""

from __future__ import annotations

import json
import pathlib
import pickle
import subprocess
from typing import Any

import pytest
import torch

from . import stress
from .models import mlp
from .test_conformance import FAST_BUILD, HERE, RUN_PYTHON

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[tuple[Any, Any]]]:
    from untorch.export import export

    torch.manual_seed(0)
    model = mlp()
    path = tmp_path_factory.mktemp("threads") / "mlp.pt2"
    batch = torch.export.Dim("batch", min=1, max=512)
    export(model, (torch.randn(4, 32),), path, dynamic_shapes=({0: batch},), progress=False, inductor=FAST_BUILD)
    with torch.no_grad():
        inputs = [torch.randn(n, 32) for n in (1, 2, 3, 5, 8, 13, 64)]
        return path, [(x.numpy(), model(x).numpy()) for x in inputs]


def run(kind: str, exported: tuple[pathlib.Path, list[tuple[Any, Any]]], directory: pathlib.Path) -> Any:
    package, pairs = exported
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps({"package": str(package), "kind": kind, "pairs": pairs}))
    process = subprocess.run(
        [RUN_PYTHON, str(HERE / "stress.py"), str(job)], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, f"the process died with {process.returncode}:\n{process.stderr[-3000:]}"
    return json.loads(process.stdout)


def test_sixteen_threads_on_four_runners(
    exported: tuple[pathlib.Path, list[tuple[Any, Any]]], tmp_path: pathlib.Path
) -> None:
    assert run("threads", exported, tmp_path) == {"right": stress.THREADS * stress.CALLS, "wrong": []}


def test_memory_does_not_grow(exported: tuple[pathlib.Path, list[tuple[Any, Any]]], tmp_path: pathlib.Path) -> None:
    seen = run("memory", exported, tmp_path)
    assert seen["right"]
    assert seen["growth"] < 100 * seen["calls"], "about 100 bytes stay behind at each call"
