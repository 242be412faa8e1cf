"""Two GPUs in one process, and the error for a missing one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import N, View, close, reference
from tests.gpu.spin import in_threads
from untorch import _core

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")


def context() -> int:
    """The driver's current context."""
    driver = pytest.importorskip("cuda.bindings.driver")
    code, handle = driver.cuCtxGetCurrent()
    assert int(code) == 0
    return int(handle)


def test_missing_gpu(mlp: tuple[Path, nn.Module]) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        untorch.InvalidArgumentError, match=rf"there is no device cuda:{count}: this machine has {count} GPU"
    ):
        untorch.load(mlp[0], device=f"cuda:{count}")


@two
def test_a_program_on_each(mlp: tuple[Path, nn.Module]) -> None:
    """Two programs of one file, each with weights, inputs, outputs and memory on its own GPU."""
    path, module = mlp
    with untorch.load(path, device="cuda:0") as zero, untorch.load(path, device="cuda:1") as one:
        for index, program in enumerate((zero, one)):
            x = torch.randn(8, 64, device=f"cuda:{index}")
            with torch.cuda.device(index):
                y = program(x)
            assert program.device == y.device == program.memory()["device"] == f"cuda:{index}"
            assert y.__dlpack_device__() == (2, index)
            there = torch.from_dlpack(y)
            assert there.device == torch.device("cuda", index)
            close(there, reference(module, x))
            host = np.ones((3, 64), np.float32)
            close(program(host), reference(module, host))
            assert program.memory()["total"] == torch.cuda.mem_get_info(index)[1]


@two
def test_tensors_of_a_gpu_that_is_not_current(mlp: tuple[Path, nn.Module]) -> None:
    """A program takes the tensors of its own GPU whichever GPU is torch's current one."""
    path, module = mlp
    for mine, current in ((0, 1), (1, 0)):
        x = torch.randn(8, 64, device=f"cuda:{mine}")
        torch.cuda.synchronize(mine)
        with untorch.load(path, device=f"cuda:{mine}") as program, torch.cuda.device(current):
            close(torch.from_dlpack(program(x)), reference(module, x))
            with program.forward.graph(x) as graph:
                close(torch.from_dlpack(graph(x)), reference(module, x))


@two
def test_memory_is_each_gpus_own(chain: Path) -> None:
    """What a program on the second GPU holds is counted there, and freed there."""
    with untorch.load(chain, device="cuda:0") as zero, untorch.load(chain, device="cuda:1") as one:
        _core.release_memory(0), _core.release_memory(1)
        before = zero.memory()["tensors"], one.memory()["tensors"]
        x = torch.ones(N, device="cuda:1")
        torch.cuda.synchronize(1)
        result = one(View(x), View(x))
        assert zero.memory()["tensors"] == before[0]
        assert one.memory()["tensors"] >= before[1] + 3 * N * 4
        del result
        torch.cuda.synchronize(1)
        reserved = one.memory()["reserved"]
        _core.release_memory(0)
        assert one.memory()["reserved"] == reserved
        _core.release_memory(1)
        assert one.memory()["reserved"] < reserved


@two
def test_an_input_on_the_wrong_gpu(mlp: tuple[Path, nn.Module]) -> None:
    """Nothing is copied from GPU to GPU unseen: the error names both, by DLPack and by the CUDA array interface."""

    class Only:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    path, _ = mlp
    for mine, other in ((0, 1), (1, 0)):
        with untorch.load(path, device=f"cuda:{mine}") as program:
            x = torch.ones(4, 64, device=f"cuda:{other}")
            torch.cuda.synchronize(other)
            message = f"the array is on cuda:{other}, the method runs on cuda:{mine}: pass a copy"
            for given in (x, Only(x)):
                with pytest.raises(untorch.InvalidArgumentError, match=message):
                    program(given)
            with pytest.raises(untorch.InvalidArgumentError, match=f"the array is on cuda:{other}"):
                program(np.ones((4, 64), np.float32), out=torch.empty(4, 32, device=f"cuda:{other}"))
            with pytest.raises(untorch.InvalidArgumentError, match=message):
                program.forward.graph(x)
            with pytest.raises(BufferError, match=f"the tensor is on cuda:{mine}"):
                program(x.to(f"cuda:{mine}")).__dlpack__(dl_device=(2, other))


@two
@pytest.mark.parametrize("current", [0, 1])
def test_the_current_gpu_stays(mlp: tuple[Path, nn.Module], current: int) -> None:
    """Loading, calls, graphs, transfers and closing leave torch's current device and the driver's context alone."""
    path, module = mlp
    with torch.cuda.device(current):
        torch.cuda.current_stream().synchronize()
        torch.zeros(1, device="cuda")
        before = context()

        def check() -> None:
            assert torch.cuda.current_device() == current and context() == before

        with untorch.load(path) as program:
            assert program.device == f"cuda:{current}"
            check()
        for index in (0, 1):
            x = torch.randn(8, 64, device=f"cuda:{index}")
            torch.cuda.synchronize(index)
            with untorch.load(path, device=f"cuda:{index}") as program:
                check()
                close(program(View(x)).numpy(), reference(module, x))
                check()
                with program.forward.graph(View(x)) as graph:
                    check()
                    close(graph(View(x)).numpy(), reference(module, x))
                check()
                program(np.ones((2, 64), np.float32))
                program.memory()
                _core.release_memory(index)
                check()
            check()


@two
def test_threads_on_both(chain: Path) -> None:
    """Four threads a GPU, plain calls and graphs, on streams of the caller's and of their own."""
    with untorch.load(chain, device="cuda:0") as zero, untorch.load(chain, device="cuda:1") as one:

        def work(number: int) -> None:
            index = number % 2
            program = (zero, one)[index]
            with torch.cuda.device(index):
                stream = torch.cuda.Stream()
                y = torch.ones(N, device="cuda")
                torch.cuda.current_stream().synchronize()  # not the device's: another thread may capture
                graph = program.forward.graph(y, y) if number >= 4 else None
                with torch.cuda.stream(stream), untorch.stream(stream if number % 4 < 2 else None):
                    for i in range(20):
                        value = float(1000 * number + i)
                        call = graph if graph is not None and i % 2 else program
                        total, _ = call(torch.full((N,), value, device="cuda"), y)
                        got = torch.from_dlpack(total)
                        assert got.device.index == index and (got == value + 20).all()
                if graph is not None:
                    graph.close()

        in_threads(8, work)


@two
def test_a_callers_stream_of_the_second_gpu(chain: Path) -> None:
    """The caller's stream may be the second GPU's while the first is current; nothing waits between calls."""
    with untorch.load(chain, device="cuda:1") as program:
        stream = torch.cuda.Stream(device=1)
        x = torch.ones(N, device="cuda:1")
        torch.cuda.synchronize(1)
        with program.forward.graph(View(x), View(x)) as graph, untorch.stream(stream):
            total = x
            for call in (program, graph, program):
                assert torch.cuda.current_device() == 0 and _core.call_stream(1) == stream.cuda_stream
                result, _ = call(View(total), View(x))
                with torch.cuda.stream(stream):
                    total = torch.from_dlpack(result) + 0
        torch.cuda.synchronize(1)
        assert (total == 61).all()
