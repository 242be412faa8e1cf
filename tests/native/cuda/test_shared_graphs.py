"""CUDA graphs that share memory, with a fake driver: fake_driver.cpp."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.native.cuda.fake_gpu import found
from untorch.export import export

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

SCRIPT = """
mib = 1 << 20
def address(tensor):
    return tensor.__cuda_array_interface__["data"][0]
def end(tensor):
    return address(tensor) + int(np.prod(tensor.shape)) * 4
def arrays(rows):
    return untorch.zeros((rows, 1024), "float32", "cuda")
program = untorch.load(path)
inputs = [arrays(rows) for rows in (8192, 6000, 4096, 2048)]
program(inputs[0])
before = fake.fake_live_bytes(0)
first = program.forward.graph(inputs[0])
alone = fake.fake_live_bytes(0) - before
held = first(inputs[0])  # of before it was shared: nothing gets its memory
graphs = [first, *(first.share(program.forward, x) for x in inputs[1:])]
found["alone"], found["all"] = alone // mib, (fake.fake_live_bytes(0) - before) // mib
outputs = [graph(x) for graph, x in zip(graphs, inputs)]
found["shapes"] = [output.shape for output in outputs]
places = [(address(output), end(output)) for output in outputs]
found["held"] = any(address(held) < stop and start < end(held) for start, stop in places[1:])
found["shared"] = len({start for start, _ in places[1:]})
found["events"] = fake.fake_events().decode().split()
try:
    first.share(program.forward, np.zeros((4, 5), np.float32))
except untorch.InvalidArgumentError as error:
    found["refused"] = str(error)
try:
    graphs[1].close()
    graphs[1].share(program.forward, inputs[0])
except untorch.ClosedError as error:
    found["closed"] = str(error)
again = graphs[3](inputs[3])
del outputs, held
for graph in graphs:
    graph.close()
found["kept"] = again.shape, (fake.fake_live_bytes(0) - before) // mib
del again
untorch.load(path).forward.graph(inputs[2]).close()
found["left"] = (fake.fake_live_bytes(0) - before) // mib
"""


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_shared_graphs(driver: Path, tmp_path: Path) -> None:
    path = tmp_path / "double.pt2"
    export(
        Double(), (torch.ones(4, 1024),), path, dynamic_shapes=({0: Dim("rows", max=1 << 20)},), device="cuda",
        arch="sm_90", progress=False,
    )  # fmt: skip
    result = found(driver, path, SCRIPT, GRAPHS=1)
    assert result["shapes"] == [[8192, 1024], [6000, 1024], [4096, 1024], [2048, 1024]]
    assert not result["held"] and result["shared"] == 1
    assert result["alone"] >= 64
    # One more output, as somebody holds the first one, and what each graph copies its input to; the second captures
    # have 24 + 16 + 8 once more. Without sharing, all of them have outputs: 96.
    assert result["all"] - result["alone"] < 24 + 48 + 48 + 8
    replays = [i for i, event in enumerate(result["events"]) if event == "replay"]
    assert len(replays) == 5
    assert all("wait" in result["events"][a:b] for a, b in itertools.pairwise(replays[1:]))
    assert "expected float32[" in result["refused"]
    assert result["closed"] == "the graph was closed"
    assert result["kept"][0] == [2048, 1024]
    assert result["left"] < result["kept"][1]


def test_a_graph_is_the_first_call(driver: Path, tmp_path: Path) -> None:
    """Since torch 2.13 a model's first run waits for its constants' folding, which a captured stream does not allow."""
    path = tmp_path / "m.pt2"
    export(nn.Linear(8, 4), (torch.rand(2, 8),), path, device="cuda", arch="sm_90", progress=False)
    script = """
x = np.zeros((2, 8), np.float32)
with untorch.load(path) as program:
    found["shape"] = program.forward.graph(x)(x).shape
"""
    assert found(driver, path, script, GRAPHS=1)["shape"] == [2, 4]
