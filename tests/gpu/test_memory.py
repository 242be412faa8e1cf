"""GPU memory: out-of-memory errors, release, shared weights, leaks."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import HEAVY_WEIGHTS, close, reference
from untorch import _core

_SIZE = r"(\d+ bytes|\d+\.\d MiB|\d+\.\d\d GiB)"
ASKED_AND_FREE = rf"out of memory on cuda:0: asked for {_SIZE}, free are {_SIZE} of {_SIZE}"
WEIGHTS = HEAVY_WEIGHTS * 4


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def fill(leave: int) -> list[torch.Tensor]:
    """Takes the GPU's memory but for about ``leave`` bytes."""
    blocks = []
    size = 4 << 30
    while size >= 16 << 20:
        if free_bytes() < leave + size:
            size //= 2
            continue
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return blocks


def test_out_of_memory(outer: Path) -> None:
    """The message says what was asked for and what is free; the program lives."""
    with untorch.load(outer) as program:
        with pytest.raises(untorch.OutOfMemoryError, match=ASKED_AND_FREE):
            program(torch.ones(1 << 20, device="cuda"))
        assert program(np.ones(3, np.float32)).tolist() == [[1, 2, 3]] * 3
    _core.release_memory(0)


def test_no_tensor_is_left_over(mlp: tuple[Path, nn.Module]) -> None:
    gc.collect()
    before = _core.live_tensors()
    with untorch.load(mlp[0]) as program:
        for _ in range(10):
            torch.from_dlpack(program(torch.ones(2, 64, device="cuda")))
        graph = program.forward.graph(torch.ones(2, 64, device="cuda"))
        graph(torch.ones(2, 64, device="cuda"))
        graph.close()
        del graph
    torch.cuda.synchronize()
    del program
    gc.collect()
    _core.synchronize(0, 1)  # lets go of inputs that were kept
    gc.collect()
    assert _core.live_tensors() == before


def test_memory_is_given_back(outer: Path) -> None:
    """Dropped tensors' memory is kept for reuse, and goes back to the driver when it is asked for."""
    gc.collect()
    _core.release_memory(0)
    with untorch.load(outer) as program:
        before = program.memory()
        y = program(torch.ones(10_000, device="cuda"))
        during = program.memory()
        assert during["tensors"] - before["tensors"] >= y.shape[0] * y.shape[1] * 4 == 400_000_000
        del y
        kept = program.memory()
        assert kept["tensors"] == before["tensors"] and kept["reserved"] == during["reserved"]
        y = program(torch.ones(10_000, device="cuda"))
        assert program.memory()["reserved"] == kept["reserved"]
        del y
        _core.release_memory(0)
        assert program.memory()["reserved"] <= before["reserved"]
        assert (program(np.ones(3, np.float32)) == [[1, 2, 3]] * 3).all()


def test_another_threads_program_lives_on(outer: Path, mlp: tuple[Path, nn.Module]) -> None:
    """While one thread runs out of memory again and again, another's results stay right."""
    path, module = mlp
    x = torch.randn(8, 64, device="cuda")
    torch.cuda.synchronize()
    expected = reference(module, x)
    stop = threading.Event()
    errors: list[BaseException] = []
    rounds = 0

    def work() -> None:
        nonlocal rounds
        try:
            with untorch.load(path) as program:
                while not stop.is_set() or rounds < 5:
                    close(program(x).numpy(), expected)
                    rounds += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with untorch.load(outer) as program:
            for _ in range(20):
                with pytest.raises(untorch.OutOfMemoryError, match=ASKED_AND_FREE):
                    program(torch.ones(1 << 20, device="cuda"))
            assert program(np.ones(3, np.float32)).tolist() == [[1, 2, 3]] * 3
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
    assert rounds >= 5


def test_out_of_memory_in_a_capture(outer: Path) -> None:
    """A graph that memory does not suffice for is an error; nothing stays reserved for it, and others are captured."""
    gc.collect()
    _core.release_memory(0)
    with untorch.load(outer) as program:
        program(np.ones(3, np.float32))
        _core.release_memory(0)
        before = program.memory()["reserved"]
        with pytest.raises(untorch.OutOfMemoryError, match=ASKED_AND_FREE):
            program.forward.graph(torch.ones(1 << 20, device="cuda"))
        with program.forward.graph(torch.ones(3, device="cuda")) as graph:
            assert graph(np.array([1, 2, 3], np.float32)).tolist() == [[1, 3, 6], [2, 6, 12], [3, 9, 18]]
        gc.collect()
        _core.release_memory(0)
        assert program.memory()["reserved"] <= before


def test_out_of_memory_while_weights_are_loaded(heavy: Path, mlp: tuple[Path, nn.Module], alone: None) -> None:
    """Weights that do not fit are an error; the same program has them once there is room, and others never noticed."""
    path, module = mlp
    x = np.ones((4, 64), np.float32)
    index = np.array([1, 2, 1500, HEAVY_WEIGHTS - 1], np.int64)
    with untorch.load(path) as other, untorch.load(heavy) as program:
        close(other(x), reference(module, x))
        blocks = fill(leave=WEIGHTS // 2)
        try:
            for _ in range(2):
                with pytest.raises(untorch.OutOfMemoryError, match=ASKED_AND_FREE.replace(_SIZE, r"256\.0 MiB", 1)):
                    program(index)
            close(other(x), reference(module, x))
        finally:
            blocks.clear()
            torch.cuda.empty_cache()
        assert program(index).tolist() == [2, 4, 1000, 2.0 * ((HEAVY_WEIGHTS - 1) % 1000)]


def test_memory_kept_for_reuse_makes_room_for_weights(outer: Path, heavy: Path, alone: None) -> None:
    """Blocks that wait for the next call are no reason to refuse weights."""
    with untorch.load(outer) as first, untorch.load(heavy) as program:
        first(torch.ones(10_000, device="cuda"))
        blocks = fill(leave=WEIGHTS // 2)
        try:
            assert first.memory()["reserved"] - first.memory()["tensors"] > WEIGHTS
            assert program(np.array([1, 2, 3, 4], np.int64)).tolist() == [2, 4, 6, 8]
        finally:
            blocks.clear()
            torch.cuda.empty_cache()


def test_programs_of_one_file_share_its_weights(heavy: Path, alone: None) -> None:
    """The second program of a file costs no second copy; when both are closed the memory is free again."""
    index = np.array([5, 6, 7, 8], np.int64)
    with untorch.load(heavy) as warm:  # the context, and what is loaded once
        warm(index)
    _core.release_memory(0)
    before = free_bytes()
    small = 32 << 20
    first = untorch.load(heavy)
    assert first.memory()["weights"] == WEIGHTS
    assert free_bytes() > before - small  # not before the method is asked for
    assert first(index).tolist() == [10, 12, 14, 16]
    one = free_bytes()
    assert WEIGHTS <= before - one < WEIGHTS + small
    second = untorch.load(heavy)
    assert second(index).tolist() == [10, 12, 14, 16]
    assert one - free_bytes() < small
    first.close()
    assert second(index).tolist() == [10, 12, 14, 16]
    assert before - free_bytes() >= WEIGHTS
    second.close()
    _core.release_memory(0)
    assert before - free_bytes() < small


def test_many_graphs_come_and_go(mlp: tuple[Path, nn.Module]) -> None:
    """A closed graph's memory serves the next ones: what is reserved does not grow."""
    path, module = mlp
    x = torch.randn(512, 64, device="cuda")
    with untorch.load(path) as program:
        reserved = []
        for _ in range(20):
            with program.forward.graph(x) as graph:
                close(torch.from_dlpack(graph(x)), reference(module, x))
            del graph
            torch.cuda.synchronize()
            gc.collect()
            reserved.append(program.memory()["reserved"])
        assert reserved[-1] <= reserved[5]
