"""Programs on the GPU: loading, calls, streams, arrays of other libraries, graphs, threads, and running out of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from untorch import _core
from untorch.export import export


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Chain(nn.Module):
    """Long enough that the GPU is still at it when the call returns; exact in float32."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = x
        for _ in range(20):
            total = torch.cumsum(total, 0) * 0 + total + y
        return total, {"double": x * 2, "sum": x + y}


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += x
        return self.calls * 1


class Outer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x[:, None] * x[None, :], 1)


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


N = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def exported(folder: Path, name: str, module: nn.Module, args: tuple[Any, ...], **options: Any) -> Path:
    path = folder / f"{name}.pt2"
    if not path.exists():
        export(module, args, path, device="cuda", progress=False, **options)
    return path


@pytest.fixture(scope="module")
def mlp(folder: Path) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    module = Mlp().eval()
    batch = Dim("batch", min=1, max=512)
    return exported(folder, "mlp", module, (torch.randn(4, 64),), dynamic_shapes=({0: batch},)), module


@pytest.fixture(scope="module")
def chain(folder: Path) -> Path:
    return exported(folder, "chain", Chain(), (torch.zeros(N), torch.zeros(N)))


@pytest.fixture(autouse=True)
def streams_of_the_librarys_own(torch_stream: None) -> Iterator[None]:
    with untorch.stream(None):
        yield


def reference(module: nn.Module, x: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.as_tensor(x).cpu().float())


def test_numpy_in_and_out(mlp: tuple[Path, nn.Module]) -> None:
    path, module = mlp
    with untorch.load(path) as program:
        assert program.device == program.forward.device == "cuda:0"
        for batch in (1, 7, 512):
            x = np.random.default_rng(batch).standard_normal((batch, 64)).astype(np.float32)
            y = program(x)
            assert isinstance(y, np.ndarray)
            torch.testing.assert_close(torch.from_numpy(y), reference(module, x), rtol=1e-4, atol=1e-4)
        memory = program.memory()
        assert memory["device"] == "cuda:0" and memory["total"] > memory["free"] > 0 and memory["reserved"] > 0
    with untorch.load(path, device="cuda:0") as program:
        assert program.device == "cuda:0"
    with pytest.raises(untorch.InvalidArgumentError, match="was compiled for cuda and cannot run on cpu"):
        untorch.load(path, device="cpu")
    with pytest.raises(untorch.InvalidArgumentError):
        untorch.load(path, device="cuda:99")


def test_the_manifest(mlp: tuple[Path, nn.Module]) -> None:
    major, minor = torch.cuda.get_device_capability()
    with untorch.load(mlp[0]) as program:
        method = program.manifest["methods"]["forward"]
    assert method["device"] == "cuda"
    assert method["gpu_architecture"] == f"sm_{major}{minor}"
    assert all("device" not in constant for constant in method["constants"])


def test_verification(folder: Path) -> None:
    report = export(Mlp().eval(), (torch.randn(4, 64),), folder / "v.pt2", device="cuda", verify=True, progress=False)
    assert report.methods["forward"].differences[0].max_rel < 1e-3


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


def test_the_callers_stream(chain: Path) -> None:
    with untorch.load(chain) as program:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), untorch.stream(stream):
            assert _core.call_stream(0) == stream.cuda_stream
            x = torch.ones(N, device="cuda")
            for i in range(20):
                total, _ = program(x, x)
                x = torch.from_dlpack(total) * 0 + i  # in the stream's order, with no wait anywhere
            assert (x == 19).all()
        with untorch.stream(0):
            assert _core.call_stream(0) == 1
            total, _ = program(torch.ones(N, device="cuda"), torch.ones(N, device="cuda"))
            assert total.__cuda_array_interface__["stream"] == 1
            assert (torch.from_dlpack(total) == 21).all()


def test_a_capture_of_torchs(mlp: tuple[Path, nn.Module]) -> None:
    path, module = mlp
    x = torch.randn(8, 64, device="cuda")
    with untorch.load(path) as program:
        program(x)  # what is loaded at the first use is loaded
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"), untorch.stream(torch.cuda.current_stream()):
            y = torch.from_dlpack(program(x)) * 2
        for seed in range(3):
            x.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            torch.testing.assert_close(y.cpu(), reference(module, x) * 2, rtol=1e-4, atol=1e-4)


def test_graphs(mlp: tuple[Path, nn.Module]) -> None:
    path, module = mlp
    with untorch.load(path) as program:
        small, large = (program.forward.graph(torch.zeros(n, 64, device="cuda")) for n in (4, 100))
        for _ in range(5):
            for graph, n in ((small, 4), (large, 100)):
                x = torch.randn(n, 64, device="cuda")
                y = graph(x)
                assert isinstance(y, untorch.Tensor)
                torch.testing.assert_close(torch.from_dlpack(y).cpu(), reference(module, x), rtol=1e-4, atol=1e-4)
        x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
        kept = small(x)
        assert isinstance(kept, np.ndarray)
        torch.testing.assert_close(torch.from_numpy(kept), reference(module, x), rtol=1e-4, atol=1e-4)
        first, second = (small(torch.full((4, 64), v, device="cuda")) for v in (1.0, 2.0))
        np.testing.assert_array_equal(first.numpy(), second.numpy())  # the graph's memory: overwritten
        offset = torch.randn(4 * 64 + 1, device="cuda")[1:].view(4, 64)  # aligned to 4 bytes
        got = torch.from_dlpack(small(offset)).cpu()
        torch.testing.assert_close(got, reference(module, offset), rtol=1e-4, atol=1e-4)
        buffer = torch.empty(4, 32, device="cuda")
        assert small(torch.zeros(4, 64, device="cuda"), out=buffer) is buffer
        for wrong in (torch.zeros(5, 64, device="cuda"), torch.zeros(4, 64, device="cuda").double()):
            with pytest.raises(untorch.InvalidArgumentError) as caught:
                small(wrong)
            assert "[4, 64]" in str(caught.value) and str(list(wrong.shape)) in str(caught.value)
        small.close()
        with pytest.raises(untorch.ClosedError, match="the graph was closed"):
            small(torch.zeros(4, 64, device="cuda"))
        assert "closed" in repr(small) and large(torch.zeros(100, 64, device="cuda")).shape == (100, 32)


def test_a_graph_of_what_cannot_be_captured(folder: Path) -> None:
    path = exported(folder, "nonzero", Nonzero(), (torch.ones(8),))
    with untorch.load(path) as program:
        assert program(np.array([0, 1, 0, 2, 0, 0, 0, 3], np.float32)).tolist() == [[1], [3], [7]]
        with pytest.raises(untorch.UntorchError):
            program.forward.graph(torch.zeros(8, device="cuda"))
        assert program(np.ones(8, np.float32)).shape == (8, 1)  # the stream is usable afterwards


def test_buffers_that_calls_change(folder: Path) -> None:
    path = exported(folder, "counter", Counter(), (torch.ones(4),))
    with untorch.load(path) as program:
        for i in range(1, 4):
            assert (program(np.ones(4, np.float32)) == i).all()


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


def test_out_of_memory(folder: Path) -> None:
    n = Dim("n", min=2, max=1 << 30)
    path = exported(folder, "outer", Outer(), (torch.ones(8),), dynamic_shapes=({0: n},))
    with untorch.load(path) as program:
        with pytest.raises(untorch.OutOfMemoryError):
            program(torch.ones(1 << 20, device="cuda"))
        assert program(np.ones(3, np.float32)).tolist() == [[1, 2, 3]] * 3
    _core.release_memory(0)


def test_two_threads_on_four_streams(chain: Path) -> None:
    with untorch.load(chain, num_runners=2) as program:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                streams = [torch.cuda.Stream() for _ in range(2)]
                for i in range(40):
                    stream = streams[i % 2]
                    with torch.cuda.stream(stream), untorch.stream(stream):
                        value = float(100 * number + i)
                        total, _ = program(torch.full((N,), value, device="cuda"), torch.ones(N, device="cuda"))
                        got = torch.from_dlpack(total)
                        assert (got == value + 20).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]


@pytest.mark.parametrize("order", [("torch", "untorch"), ("untorch", "torch"), ("untorch", "cupy"), ("untorch",)])
def test_orders_of_importing(mlp: tuple[Path, nn.Module], order: tuple[str, ...]) -> None:
    if "cupy" in order:
        pytest.importorskip("cupy")
    path, module = mlp
    code = f"""
import json, sys
{"; ".join(f"import {name}" for name in order)}
import numpy
program = untorch.load({str(path)!r})
x = numpy.ones((2, 64), numpy.float32)
first = program(x)
second = first
if "torch" in sys.modules:
    second = torch.from_dlpack(program(torch.ones(2, 64, device="cuda"))).cpu().numpy()
if "cupy" in sys.modules:
    second = cupy.asnumpy(cupy.from_dlpack(program(cupy.ones((2, 64), numpy.float32))))
print(json.dumps([first.tolist(), second.tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = reference(module, np.ones((2, 64), np.float32))
    for result in json.loads(done.stdout.splitlines()[-1]):
        torch.testing.assert_close(torch.tensor(result), expected, rtol=1e-4, atol=1e-4)


def test_the_users_model_stays_where_it_is(folder: Path) -> None:
    module = Mlp().eval()
    export(module, (torch.randn(4, 64),), folder / "stays.pt2", device="cuda", progress=False)
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    on_gpu = Mlp().eval().cuda()
    export(on_gpu, (torch.randn(4, 64, device="cuda"),), folder / "there.pt2", device="cuda", progress=False)
    program = torch.export.export(module, (torch.randn(4, 64),))
    export(program, path=folder / "program.pt2", device="cuda", progress=False)
    with untorch.load(folder / "program.pt2") as loaded:
        x = np.ones((4, 64), np.float32)
        torch.testing.assert_close(torch.from_numpy(loaded(x)), reference(module, x), rtol=1e-4, atol=1e-4)


def test_a_constant_on_the_cpu(folder: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor([1.0, 2.0, 3.0]).to(x.device) + torch.tensor(5.0)

    path = exported(folder, "constant", Model(), (torch.ones(3),))
    with untorch.load(path) as program:
        assert program(np.ones(3, np.float32)).tolist() == [6, 7, 8]


def test_no_tensor_is_left_over(mlp: tuple[Path, nn.Module]) -> None:
    import gc

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
