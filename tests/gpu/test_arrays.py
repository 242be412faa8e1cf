"""Arrays of other libraries in and out: DLPack, the CUDA array interface, cupy, ``out=``; inputs that are copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import N, reference
from tests.gpu.spin import Spin


def test_torch_in_and_out(mlp: tuple[Path, nn.Module]) -> None:
    path, module = mlp
    x = torch.randn(5, 64, device="cuda")
    with untorch.load(path) as program:
        y = program(x)
        assert isinstance(y, untorch.Tensor)
        assert (y.device, y.dtype, y.shape) == ("cuda:0", "float32", (5, 32))
        assert y.__dlpack_device__() == (2, 0)
        there = torch.from_dlpack(y)
        assert there.is_cuda and there.data_ptr() == y.__cuda_array_interface__["data"][0]
        torch.testing.assert_close(there.cpu(), reference(module, x), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(y.numpy(), there.cpu().numpy())
        host = (
            np.from_dlpack(y, device="cpu", copy=True) if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else y.numpy()
        )
        np.testing.assert_array_equal(host, y.numpy())
        with pytest.raises(BufferError, match="stream 0 is ambiguous"):
            y.__dlpack__(stream=0)
        with pytest.raises(TypeError, match=r"the tensor is on cuda:0: numpy\(\) makes a copy"):
            np.asarray(y)
        mixed = program(torch.randn(5, 64))  # on the CPU: copied
        assert isinstance(mixed, untorch.Tensor) and mixed.device == "cuda:0"
    assert there.isfinite().all()  # it outlives the program


def test_cupy(mlp: tuple[Path, nn.Module]) -> None:
    cupy = pytest.importorskip("cupy")
    path, module = mlp
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    with untorch.load(path) as program:
        expected = reference(module, x)
        for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
            with stream, untorch.stream(stream):
                y = cupy.from_dlpack(program(cupy.asarray(x)))
            torch.testing.assert_close(torch.from_numpy(cupy.asnumpy(y)), expected, rtol=1e-4, atol=1e-4)
        y = cupy.asarray(program(cupy.asarray(x)))  # by __cuda_array_interface__, or DLPack
        torch.testing.assert_close(torch.from_numpy(cupy.asnumpy(y)), expected, rtol=1e-4, atol=1e-4)


def test_the_cuda_array_interface(mlp: tuple[Path, nn.Module]) -> None:
    path, module = mlp
    x = torch.randn(5, 64, device="cuda")
    torch.cuda.synchronize()

    class Only:
        __cuda_array_interface__: ClassVar = {**x.__cuda_array_interface__, "version": 3, "stream": 1}

    with untorch.load(path) as program:
        y = program(Only())
        interface = y.__cuda_array_interface__
        assert interface["version"] == 3 and interface["typestr"] == "<f4" and interface["strides"] is None
        assert interface["stream"] not in (None, 0)
        torch.testing.assert_close(torch.from_numpy(y.numpy()), reference(module, x), rtol=1e-4, atol=1e-4)

        class Host:
            __cuda_array_interface__: ClassVar = {
                "version": 3, "shape": (5, 64), "typestr": "<f4", "data": (np.zeros(320, np.float32).ctypes.data, False),
            }  # fmt: skip

        with pytest.raises(untorch.InvalidArgumentError, match="the address is not a GPU's"):
            program(Host())


def test_arrays_that_come_and_go(chain: Path) -> None:
    """Inputs that are freed at once, outputs that are dropped while they are read, on streams of everybody's own."""
    with untorch.load(chain) as program:
        for i in range(30):
            side = torch.cuda.Stream() if i % 2 else torch.cuda.current_stream()
            with torch.cuda.stream(side):
                # Temporaries: torch may give their memory to the next allocation, which overwrites it.
                total, parts = program(torch.full((N,), float(i), device="cuda"), torch.ones(N, device="cuda"))
                for _ in range(4):
                    torch.full((N,), -1e9, device="cuda")
                got = torch.from_dlpack(total) + 0
                double = torch.from_dlpack(parts["double"]) + 0
                del total, parts
                program(torch.full((N,), 7.0, device="cuda"), torch.full((N,), 9.0, device="cuda"))
                side.synchronize()
                assert (got == i + 20).all() and (double == 2 * i).all()


def test_out_buffers(chain: Path) -> None:
    with untorch.load(chain) as program:
        x = torch.ones(N, device="cuda")
        on_gpu, on_cpu = torch.empty(N, device="cuda"), np.empty(N, np.float32)
        total, parts = program(x, x, out=(on_gpu, {"double": on_cpu, "sum": None}))
        torch.cuda.synchronize()
        assert total is on_gpu and parts["double"] is on_cpu
        assert (on_cpu == 2).all() and (torch.from_dlpack(parts["sum"]) == 2).all() and (on_gpu == 21).all()
        with pytest.raises(untorch.InvalidArgumentError, match=r"out\[0\]"):
            program(x, x, out=(torch.empty(3, device="cuda"), {"double": None, "sum": None}))
        with pytest.raises(
            untorch.InvalidArgumentError, match=r"out\[0\]: expected a numpy array or an array on cuda:0"
        ):
            program(x, x, out=(3, {"double": None, "sum": None}))


@pytest.mark.parametrize("memory", ["small", "large", "large pinned"])
def test_a_numpy_input_may_be_changed_after_the_call(chain: Path, echo: Path, memory: str) -> None:
    """A numpy input among GPU arrays has been read when the call returns, though the GPU has not come to it yet."""
    stream = torch.cuda.Stream()
    with (
        untorch.load(echo if memory == "small" else chain) as program,
        torch.cuda.stream(stream),
        untorch.stream(stream),
    ):
        shape = (8, 64) if memory == "small" else (N,)
        host = torch.full(shape, 3.0)
        array = (host.pin_memory() if memory == "large pinned" else host).numpy()
        rest: tuple[Any, ...] = () if memory == "small" else (torch.ones(N, device="cuda"),)
        # The small model has one input: a CPU tensor is a DLPack object, so the output stays on the GPU.
        given = torch.from_numpy(array) if memory == "small" else array
        program(given, *rest)
        stream.synchronize()
        with Spin(stream, seconds=0.3):
            result = program(given, *rest)
            array[:] = -1e6
        output = result[1] if memory == "small" else result[0]
        assert (torch.from_dlpack(output) == (7 if memory == "small" else 23)).all()


def test_a_contiguous_input_is_asked_for(mlp: tuple[Path, nn.Module]) -> None:
    """Nothing is copied on the way in: another layout is an error that says so, by DLPack and by the CUDA interface."""
    x = torch.randn(64, 4, device="cuda").t()

    class Only:
        __cuda_array_interface__: ClassVar = x.__cuda_array_interface__

    with untorch.load(mlp[0]) as program:
        for given in (x, Only()):
            with pytest.raises(untorch.InvalidArgumentError, match=r"strides \[1, 4\]: it must be contiguous"):
                program(given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (70 << 20,)])
def test_zeros_and_empty(dtype: str, shape: tuple[int, ...]) -> None:
    for make in (untorch.empty, untorch.zeros):
        made = make(shape, dtype, "cuda")
        assert (made.device, made.dtype, made.shape) == ("cuda:0", dtype, shape)
        there = torch.from_dlpack(made)
        assert there.is_cuda and there.is_contiguous() and there.data_ptr() % 256 == 0
        if make is untorch.zeros:
            assert not there.any()
        there.fill_(1)


def test_zeros_come_in_the_order_of_the_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), untorch.stream(stream):
        made = untorch.zeros((1 << 20,), "float32", "cuda")
        there = torch.from_dlpack(made)
        assert not there.any()


def test_copied_rows() -> None:
    made = untorch.zeros((3, 5), "float32", "cuda")
    torch.from_dlpack(made)[1] = 4
    torch.cuda.synchronize()
    made.copy_row(1, 2)
    assert made.numpy().tolist() == [[0.0] * 5, [4.0] * 5, [4.0] * 5]


def test_too_large_zeros() -> None:
    with pytest.raises(untorch.OutOfMemoryError):
        untorch.zeros((1 << 46,), "uint8", "cuda")
