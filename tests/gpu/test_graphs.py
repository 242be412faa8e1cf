"""CUDA graphs of calls: static inputs, outputs, streams, buffers that replays change, random numbers."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import Filter, N, Nonzero, Sound, close, exported, reference
from tests.gpu.spin import Spin, in_threads
from untorch import _core


def address(tensor: untorch.Tensor) -> int:
    return int(tensor.__cuda_array_interface__["data"][0])


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


def test_transforms_to_real_values(folder: Path) -> None:
    path = exported(folder, "filter", Filter(), (torch.randn(2, 1001),))
    with untorch.load(path) as program:
        graph = program.forward.graph(torch.zeros(2, 1001, device="cuda"))
        for _ in range(3):
            x = torch.randn(2, 1001, device="cuda")
            for got in (program.forward(x), graph(x)):
                whole, windows = (torch.from_dlpack(part) for part in got)
                torch.testing.assert_close(whole, x * 0.5, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(windows[:, 64:-64], x[:, 64:-64], rtol=1e-4, atol=1e-5)


def test_graphs_that_share_memory(folder: Path) -> None:
    """Of several sizes, on several streams, in any order: so large that intermediate tensors are shared."""
    module = nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 32)).eval()
    shapes = ({0: torch.export.Dim("batch", max=2048)},)
    path = exported(folder, "wide", module, (torch.randn(4, 64),), dynamic_shapes=shapes)
    sizes = (2000, 7, 900, 1500, 1)
    with untorch.load(path) as program:
        inputs = {n: torch.randn(n, 64, device="cuda") for n in sizes}
        want = {n: reference(module, x) for n, x in inputs.items()}
        program(inputs[sizes[0]])
        apart = program.memory()["reserved"]
        first = program.forward.graph(inputs[sizes[0]])
        alone = program.memory()["reserved"] - apart
        graphs = {sizes[0]: first, **{n: first.share(program.forward, inputs[n]) for n in sizes[1:]}}
        together = program.memory()["reserved"] - apart
        # Small blocks are each graph's own, 2 MiB at a time.
        assert together < alone + (len(sizes) << 22)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        results = []
        for turn in range(60):
            n = sizes[turn * 7 % len(sizes)]
            with torch.cuda.stream(streams[turn % 3]):
                results.append((n, torch.from_dlpack(graphs[n](inputs[n])).clone()))
        torch.cuda.synchronize()
        n, got = results[-1]  # earlier outputs may have been overwritten while they were copied
        torch.testing.assert_close(got.cpu(), want[n], rtol=1e-4, atol=1e-4)
        stream = streams[0]
        with torch.cuda.stream(stream):
            results = [(n, torch.from_dlpack(graphs[n](inputs[n])).clone()) for n in sizes * 4]
        stream.synchronize()
        for n, got in results:
            torch.testing.assert_close(got.cpu(), want[n], rtol=1e-4, atol=1e-4)
        first.close()
        got = torch.from_dlpack(graphs[1500](inputs[1500])).clone().cpu()
        torch.testing.assert_close(got, want[1500], rtol=1e-4, atol=1e-4)


def test_a_graph_of_what_cannot_be_captured(folder: Path) -> None:
    path = exported(folder, "nonzero", Nonzero(), (torch.ones(8),))
    with untorch.load(path) as program:
        assert program(np.array([0, 1, 0, 2, 0, 0, 0, 3], np.float32)).tolist() == [[1], [3], [7]]
        with pytest.raises(untorch.UntorchError):
            program.forward.graph(torch.zeros(8, device="cuda"))
        assert program(np.ones(8, np.float32)).shape == (8, 1)  # the stream is usable afterwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_graph_of_convolutions(folder: Path, dtype: torch.dtype) -> None:
    """Libraries launch kernels in other ways than compiled models do."""
    module = Sound().to(dtype)
    path = exported(
        folder, f"sound_{str(dtype).removeprefix('torch.')}", module, (torch.zeros(1, 128, 600, dtype=dtype),)
    )
    with untorch.load(path) as program, torch.no_grad():
        graph = program.forward.graph(torch.zeros(1, 128, 600, dtype=dtype, device="cuda"))
        module = module.cuda()
        for _ in range(3):
            x = torch.randn(1, 128, 600, device="cuda").to(dtype)
            want = module(x)
            for got in (program(x), graph(x), graph(x.cpu().float().numpy()) if dtype == torch.float32 else graph(x)):
                got = torch.as_tensor(got) if isinstance(got, np.ndarray) else torch.from_dlpack(got)
                torch.testing.assert_close(got.cuda(), want, rtol=2e-2, atol=2e-2)


def test_a_graph_on_many_streams(chain: Path) -> None:
    """One graph, captured on no stream of the caller's, replays on everybody's, in the order that the caller makes."""
    cupy = pytest.importorskip("cupy")
    own_cupy = cupy.cuda.Stream(non_blocking=True)
    streams = [
        ("torch", torch.cuda.Stream()), ("torch", torch.cuda.Stream()), ("cupy", own_cupy), ("null", 0), ("own", None),
    ]  # fmt: skip
    with untorch.load(chain) as program:
        ones = torch.ones(N, device="cuda")
        torch.cuda.synchronize()
        with program.forward.graph(ones, ones) as graph:
            for i in range(25):
                kind, stream = streams[i % len(streams)]
                if kind == "own":
                    handle = _core.call_stream(0)
                elif kind == "cupy":
                    handle = own_cupy.ptr
                else:
                    handle = getattr(stream, "cuda_stream", 0)
                theirs = torch.cuda.ExternalStream(handle) if handle > 1 else torch.cuda.default_stream()
                with torch.cuda.stream(theirs), untorch.stream(stream):
                    assert _core.call_stream(0) == (handle or 1)
                    total, parts = graph(torch.full((N,), float(i), device="cuda"), ones)
                    assert total.__cuda_array_interface__["stream"] == (handle or 1)
                    # Reading them waits, so the next stream's replay comes after.
                    assert (torch.from_dlpack(total) == i + 20).all()
                    assert (torch.from_dlpack(parts["double"]) == 2 * i).all()
                    del total, parts


def test_a_replay_that_copies_waits_for_the_one_before(chain: Path) -> None:
    """A replay's input is not overwritten by the next replay's on another stream while it waits for its turn."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    ones = torch.ones(N, device="cuda")
    odd = [torch.empty(N + 1, device="cuda")[1:].fill_(value) for value in (3.0, 1000.0)]  # copied: aligned to 4 bytes
    torch.cuda.synchronize()
    with untorch.load(chain) as program, program.forward.graph(ones, ones) as graph:
        for stream, x in zip((first, second), odd, strict=True):
            with torch.cuda.stream(stream), untorch.stream(stream):
                torch.from_dlpack(graph(x, ones)[0]) + 0
                stream.synchronize()
        with Spin(first):
            with torch.cuda.stream(first), untorch.stream(first):
                got = torch.from_dlpack(graph(odd[0], ones)[0]) + 0
            with torch.cuda.stream(second), untorch.stream(second):
                graph(odd[1], ones)
        torch.cuda.synchronize()
        assert (got == 23).all(), f"got {got[0].item()}"


@pytest.mark.parametrize("streams", ["theirs", "own"])
def test_two_threads_with_a_graph_each(chain: Path, streams: str) -> None:
    """Two graphs of one method, replayed by two threads at once, have memory of their own."""
    with untorch.load(chain) as program:

        def work(number: int) -> None:
            stream = torch.cuda.Stream()
            ones = torch.ones(N, device="cuda")
            with torch.cuda.stream(stream), untorch.stream(stream if streams == "theirs" else None):
                stream.wait_stream(torch.cuda.default_stream())
                with program.forward.graph(ones, ones) as graph:
                    for i in range(40):
                        value = float(1000 * number + i)
                        total, parts = graph(torch.full((N,), value, device="cuda"), ones)
                        assert (torch.from_dlpack(total) == value + 20).all()
                        assert (torch.from_dlpack(parts["sum"]) == value + 1).all()

        in_threads(2, work)


def test_two_signatures_in_turn_on_two_streams(either_mlp: tuple[Path, nn.Module]) -> None:
    """Graphs of two batch sizes beside plain calls of a third, each on its own stream, none waiting for another."""
    path, module = either_mlp
    streams = [torch.cuda.Stream() for _ in range(3)]
    with untorch.load(path) as program:
        calls = [program.forward.graph(torch.zeros(n, 64, device="cuda")) for n in (4, 100)]
        torch.cuda.synchronize()
        for _ in range(5):
            inputs, results = [], []
            for call, n, stream in zip([*calls, program], (4, 100, 33), streams, strict=True):
                with torch.cuda.stream(stream), untorch.stream(stream):
                    inputs.append(torch.randn(n, 64, device="cuda"))
                    results.append(torch.from_dlpack(call(inputs[-1])) + 0)
            torch.cuda.synchronize()
            for x, y in zip(inputs, results, strict=True):
                close(y, reference(module, x))


def test_buffers_that_replays_change(counter: Path) -> None:
    """Replays and plain calls, on several streams and with nothing waiting in between, count on one buffer."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    with untorch.load(counter) as program:
        one = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        graph = program.forward.graph(one)
        assert (program(np.ones(4, np.float32)) == 1).all()  # capturing did not count
        results = []
        for i in range(30):
            stream = streams[i % 3]
            with torch.cuda.stream(stream), untorch.stream(stream):
                out = torch.empty(4, device="cuda")
                results.append((graph if i % 2 else program)(one, out=out))
        torch.cuda.synchronize()
        last = program(np.ones(4, np.float32))
        assert (last == 32).all()
        # Plain calls have outputs of their own; a graph's may have been overwritten before they were copied.
        assert [r.tolist() for r in results[::2]] == [[float(i)] * 4 for i in range(2, 32, 2)]
        graph.close()


def test_random_numbers_are_fresh_in_replays(noise: Path) -> None:
    """Every replay draws new numbers, which ``manual_seed`` repeats, among plain calls too."""
    with untorch.load(noise) as program:
        x = torch.ones(4096, device="cuda")
        with program.forward.graph(x) as graph:

            def draw() -> list[np.ndarray]:
                out = []
                for call in (graph, graph, program, graph):
                    uniform, dropped = call(x)
                    out += [uniform.numpy(), dropped.numpy()]
                return out

            untorch.manual_seed(7)
            first = draw()
            second = draw()
            untorch.manual_seed(7)
            again = draw()
            untorch.manual_seed(8)
            other = draw()
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    everything = [*first, *second, *other]
    uniforms, dropouts = everything[::2], everything[1::2]
    for kind in (uniforms, dropouts):
        assert len({a.tobytes() for a in kind}) == len(kind)
    for a in uniforms:
        assert (a >= 1).all() and (a < 2).all() and abs(a.mean() - 1.5) < 0.05
    for a in dropouts:
        assert set(np.unique(a)) == {0.0, 2.0} and abs(a.mean() - 1) < 0.2


def test_inputs_are_read_where_they_lie(echo: Path) -> None:
    """A replay reads each aligned array in place, the next one elsewhere; a misaligned one it copies. The values fit."""
    with untorch.load(echo) as program, program.forward.graph(torch.zeros(8, 64, device="cuda")) as graph:
        arrays = [torch.randn(8, 64, device="cuda") for _ in range(3)]
        odd = torch.randn(8 * 64 + 1, device="cuda")[1:].view(8, 64)
        assert odd.data_ptr() % 16 == 4
        torch.cuda.synchronize()
        for x in (*arrays, odd, *arrays, odd):
            same, result = graph(x)
            assert (address(same) == x.data_ptr()) is (x is not odd)
            torch.testing.assert_close(torch.from_dlpack(result), x * 2 + 1, rtol=0, atol=0)
            torch.testing.assert_close(torch.from_dlpack(same), x, rtol=0, atol=0)
        strided = torch.randn(64, 8, device="cuda").t()
        with pytest.raises(untorch.InvalidArgumentError, match="it must be contiguous"):
            graph(strided)


def test_a_graph_captured_from_numpy(either_mlp: tuple[Path, nn.Module]) -> None:
    """numpy arrays to capture with; then arrays of either kind, which do not see one another's values."""
    path, module = either_mlp
    with untorch.load(path) as program, program.forward.graph(np.zeros((4, 64), np.float32)) as graph:
        for seed in range(4):
            x = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)
            on_gpu = torch.from_numpy(x).cuda() * 3
            y = graph(x)
            assert isinstance(y, np.ndarray)
            close(torch.from_dlpack(graph(on_gpu)), reference(module, on_gpu))
            close(y, reference(module, x))  # a copy
            buffer = np.empty((4, 32), np.float32)
            assert graph(x, out=buffer) is buffer
            np.testing.assert_array_equal(buffer, y)


def test_outputs_outlive_their_graph(either_mlp: tuple[Path, nn.Module]) -> None:
    """An output stays valid and unchanged when its graph is closed, its program too, and memory is asked for again."""
    path, module = either_mlp
    x = torch.randn(100, 64, device="cuda")
    program = untorch.load(path)
    graph = program.forward.graph(x)
    y = graph(x)
    taken = torch.from_dlpack(graph(x))
    graph.close()
    program(x * 2)
    with program.forward.graph(x) as other:
        other(x * 5)
    del graph
    program.close()
    gc.collect()
    _core.release_memory(0)
    with untorch.load(path) as again:
        for _ in range(3):
            again(torch.randn(100, 64, device="cuda"))
        torch.cuda.synchronize()
        close(y.numpy(), reference(module, x))
        close(taken, reference(module, x))


def test_a_graph_keeps_its_program(mlp: tuple[Path, nn.Module]) -> None:
    """A graph that is all that is left of its program still replays."""
    path, module = mlp
    x = torch.randn(4, 64, device="cuda")
    program = untorch.load(path)
    graph = program.forward.graph(x)
    del program
    gc.collect()
    _core.release_memory(0)
    close(torch.from_dlpack(graph(x)), reference(module, x))
    graph.close()


class Pool(nn.Module):
    def forward(self, x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        pool += x
        return pool.sum()


def test_inputs_that_the_model_writes_into(folder: Path) -> None:
    path = exported(folder, "written_pool", Pool(), (torch.ones(64), torch.zeros(32, 64)))
    with untorch.load(path) as program:
        pool = untorch.zeros((32, 64), "float32", "cuda")
        x = torch.ones(64, device="cuda")
        graph = program.forward.graph(x, pool)
        assert not pool.numpy().any()  # nothing runs while a call is captured
        for i in range(1, 4):
            graph(x, pool)
            assert (pool.numpy() == i).all()
        with pytest.raises(untorch.InvalidArgumentError, match="pass the array that the graph was captured with"):
            graph(x, untorch.zeros((32, 64), "float32", "cuda"))
        there = torch.from_dlpack(pool)
        del pool
        gc.collect()
        graph(x, there)
        torch.cuda.synchronize()  # torch's stream and the graph's are two
        assert (there == 4).all()
        with pytest.raises(untorch.InvalidArgumentError, match="it is on the CPU: pass memory on cuda:0"):
            program.forward.graph(x, np.zeros((32, 64), np.float32))
        misaligned = torch.zeros(32 * 64 + 1, device="cuda")[1:].view(32, 64)
        for call in (program.forward, program.forward.graph):
            with pytest.raises(untorch.InvalidArgumentError, match="address that is no multiple of 16"):
                call(x, misaligned)
        graph.close()
