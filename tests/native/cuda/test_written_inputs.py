"""Inputs that a method writes into, and arrays of the library on a GPU, with a fake driver: fake_driver.cpp."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.native.cuda.fake_gpu import found
from untorch.export import export

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

# Arrays of others, which in the fake driver may lie anywhere.
ARRAYS = """
class Given:
    def __init__(self, data, shape):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": "<f4", "data": (data, False), "strides": None, "stream": None}
def address(tensor):
    return tensor.__cuda_array_interface__["data"][0]
def refusal(call, *args):
    try:
        call(*args)
    except untorch.InvalidArgumentError as error:
        return str(error)
"""


class Pool(nn.Module):
    def forward(self, x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        pool += x.sum(0)
        return x * 2


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "pool.pt2"
    blocks = Dim("blocks", min=4, max=1 << 30)
    export(
        Pool(), (torch.ones(4, 32), torch.zeros(8, 32)), path, dynamic_shapes=(None, {0: blocks}), device="cuda",
        arch="sm_90", progress=False,
    )  # fmt: skip
    return path


def test_arrays(driver: Path, package: Path) -> None:
    script = """
found["first"] = untorch.empty(4, np.int64, "cuda").device
made = untorch.zeros((3, 5), "float32", "cuda:1")
found["made"] = made.device, made.shape, made.dtype, address(made) % 256, made.numpy().tolist() == [[0.0] * 5] * 3
before = fake.fake_live_bytes(0)
large = untorch.zeros((80 << 20,), "uint8", "cuda")
found["large"] = fake.fake_live_bytes(0) - before, address(large) % 256
del large
found["freed"] = fake.fake_live_bytes(0) - before
try:
    untorch.zeros(1, "int8", "cuda:2")
except untorch.InvalidArgumentError as error:
    found["no device"] = str(error)
try:
    untorch.zeros(1 << 40, "int8", "cuda")
except untorch.OutOfMemoryError as error:
    found["too much"] = str(error)
"""
    result = found(driver, package, ARRAYS + script)
    assert result["made"] == ["cuda:1", [3, 5], "float32", 0, True]
    assert result["first"] == "cuda:0"
    assert result["large"] == [80 << 20, 0] and result["freed"] == 0
    assert result["no device"].endswith("device: expected cuda:0 to cuda:1, got cuda:2")
    assert "out of memory" in result["too much"]


def test_misaligned_ones_are_refused(driver: Path, package: Path) -> None:
    script = """
x, pool = untorch.zeros((4, 32), "float32", "cuda"), untorch.zeros((9, 32), "float32", "cuda")
program = untorch.load(path)
found["aligned"] = program(x, Given(address(pool) + 16, (8, 32))).shape
found["misaligned"] = refusal(program, x, Given(address(pool) + 4, (8, 32)))
found["in a graph"] = refusal(program.forward.graph, x, Given(address(pool) + 4, (8, 32)))
"""
    result = found(driver, package, ARRAYS + script, GRAPHS=1)
    assert result["aligned"] == [4, 32]
    text = (
        "method 'forward', input 'pool': expected float32[blocks, 32], got float32[8, 32] at an address that is no "
        "multiple of 16: the model writes into this input, and may write to an aligned copy instead: pass aligned "
        "memory (untorch.zeros, untorch.empty)"
    )
    assert re.sub(r"\bs\d+", "blocks", result["misaligned"]) == text and result["in a graph"] == result["misaligned"]


def test_a_graph_writes_to_the_callers_memory(driver: Path, package: Path) -> None:
    script = """
import gc
mib = 1 << 20
x = untorch.zeros((4, 32), "float32", "cuda")
rows = 80 * mib // 128
program = untorch.load(path)
program.forward.open()
program(x, untorch.zeros((4, 32), "float32", "cuda"))
start = fake.fake_live_bytes(0)
pool, other = (untorch.zeros((rows, 32), "float32", "cuda") for _ in range(2))
before = fake.fake_live_bytes(0)
graph = program.forward.graph(x, pool)
found["captured"] = (fake.fake_live_bytes(0) - before) // mib
found["replayed"] = graph(x, pool).shape, graph(x, Given(address(pool), (rows, 32))).shape
found["replays"] = fake.fake_events().decode().count("replay")
found["other"] = refusal(graph, x, other)
found["shape"] = refusal(graph, x, Given(address(pool), (rows - 1, 32)))
found["host"] = refusal(graph, np.zeros((4, 32), np.float32), np.zeros((rows, 32), np.float32))
found["capture of host memory"] = refusal(program.forward.graph, x, np.zeros((8, 32), np.float32))
where = address(pool)
del pool, other
gc.collect()
found["kept"] = (fake.fake_live_bytes(0) - start) // mib
found["still"] = graph(x, Given(where, (rows, 32))).shape
graph.close()
gc.collect()
untorch._core.synchronize(0, untorch._core.call_stream(0))
found["left"] = (fake.fake_live_bytes(0) - start) // mib
"""
    result = found(driver, package, ARRAYS + script, GRAPHS=1)
    assert result["captured"] < 40  # no memory of the pool's size
    assert result["replayed"] == [[4, 32], [4, 32]] and result["replays"] == 2
    name = "graph of method 'forward', input 'pool': "
    assert result["other"] == (
        f"{name}the model writes into it, so the graph was captured with its memory, and this is other memory: pass "
        "the array that the graph was captured with, or capture another graph"
    )
    assert f"{name}it was captured for float32[655360, 32], got float32[655359, 32]" in result["shape"]
    assert (
        result["host"]
        == result["capture of host memory"]
        == (f"{name}the model writes into it, and it is on the CPU: pass memory on cuda:0 (untorch.zeros)")
    )
    assert 80 <= result["kept"] < 120 and result["left"] < 40
    assert result["still"] == [4, 32]
