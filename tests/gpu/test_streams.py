"""Streams: which one a call is enqueued on, that it blocks on none, captures, threads, streams of other contexts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import N, View, close, reference
from tests.gpu.spin import Spin, in_threads, passes
from untorch import _core


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


def ones(n: int = N, value: float = 1.0) -> torch.Tensor:
    return torch.full((n,), value, device="cuda")


def test_a_call_waits_for_nothing(chain: Path) -> None:
    """The caller's stream is busy until the test says so: the call returns before, and has not run yet."""
    stream = torch.cuda.Stream()
    with untorch.load(chain) as program, torch.cuda.stream(stream), untorch.stream(stream):
        x, y = ones(), ones()

        def work(value: float) -> tuple[torch.Tensor, torch.Tensor]:
            x.fill_(value)
            total, parts = program(x, y)
            x.fill_(-1.0)  # after the call, in the stream's order
            return torch.from_dlpack(total) + 0, torch.from_dlpack(parts["double"]) + 0

        work(2.0)
        stream.synchronize()
        with Spin(stream) as spin:
            got, double = work(3.0)
            assert spin.running
        assert (got == 23).all() and (double == 6).all()


def test_a_graph_and_out_buffers_wait_for_nothing(chain: Path) -> None:
    """The same for a replay that reads the arrays where they lie, for one that copies them, and for ``out=``."""
    stream = torch.cuda.Stream()
    with untorch.load(chain) as program, torch.cuda.stream(stream), untorch.stream(stream):
        x, y = ones(), ones()
        odd = torch.empty(N + 1, device="cuda")[1:].copy_(x)
        buffers = [torch.empty(N, device="cuda") for _ in range(3)]
        graph = program.forward.graph(x, y)
        tree: Any = [(buffer, {"double": None, "sum": None}) for buffer in buffers]
        calls = [(program, x), (graph, x), (graph, odd)]
        for (call, first), out in zip(calls, tree, strict=True):
            call(first, y, out=out)
        stream.synchronize()
        for (call, first), out, buffer in zip(calls, tree, buffers, strict=True):
            with Spin(stream) as spin:
                buffer.fill_(-1.0)
                first.fill_(3.0)
                total, _ = call(first, y, out=out)
                first.fill_(-1.0)
                assert spin.running
            assert total is buffer and (buffer == 23).all()
        graph.close()


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_small_array_on_the_cpu_is_taken_without_waiting(echo: Path, pinned: bool) -> None:
    """Up to 256 KiB, inputs on the CPU go through memory of the library's own: the call does not wait for the stream."""
    stream = torch.cuda.Stream()
    with untorch.load(echo) as program, untorch.stream(stream):
        x = torch.full((8, 64), 3.0)
        x = x.pin_memory() if pinned else x
        program(x)
        stream.synchronize()
        with Spin(stream) as spin:
            _, result = program(x)
            assert spin.running
        assert (result.numpy() == 7).all()


def test_other_streams_are_not_held_up(chain: Path) -> None:
    """While a call waits in its stream, the legacy stream and other streams of the caller go on.

    Two streams may share a hardware queue by chance, so one of several busy streams has to show it.
    """
    others = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    went_on = [False] * len(others)
    with untorch.load(chain) as program:
        x, y, z = ones(), ones(), ones(16)
        z.add_(1)
        torch.cuda.synchronize()
        for _ in range(3):
            busy = torch.cuda.Stream()
            with untorch.stream(busy):
                program(x, y)
                busy.synchronize()
                with Spin(busy) as spin:
                    program(x, y)
                    assert spin.running
                    for i, other in enumerate(others):
                        with torch.cuda.stream(other):
                            z.add_(1)
                            event = torch.cuda.Event()
                            event.record(other)
                        went_on[i] = went_on[i] or passes(event, spin)
    assert all(went_on), went_on


def test_the_librarys_own_stream_passes_a_busy_legacy_stream(chain: Path) -> None:
    """Without a caller's stream, calls do not wait for the legacy stream, where nothing of theirs is."""
    x = np.ones(N, np.float32)
    with untorch.load(chain) as program:
        program(x, x)
        seen = False
        for _ in range(3):
            done: list[Any] = []
            with Spin(0) as spin:
                # In threads of their own, which have streams of their own.
                thread = threading.Thread(target=lambda done=done: done.append(program(x, x)[0]))
                thread.start()
                thread.join()
                seen = seen or spin.running
            assert (done[0] == 21).all()
        assert seen


def test_weights_are_ready_for_the_first_call(mlp: tuple[Path, nn.Module]) -> None:
    """The first calls, at once after loading, from four threads on four streams: the weights are all there."""
    path, module = mlp
    x = torch.randn(16, 64, device="cuda")
    torch.cuda.synchronize()
    expected = reference(module, x)
    for _ in range(5):
        with untorch.load(path) as program:

            def work(number: int, program: untorch.Program = program) -> None:
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream), untorch.stream(stream):
                    close(torch.from_dlpack(program(x)), expected)

            in_threads(4, work)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_of_torchs(either_mlp: tuple[Path, nn.Module], mode: str) -> None:
    """A call inside torch's capture becomes part of torch's graph; replays compute with what its input holds then."""
    path, module = either_mlp
    stream = torch.cuda.Stream()
    with untorch.load(path) as program:
        x = torch.randn(8, 64, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), untorch.stream(stream):
            program(x)  # what is loaded at the first use is loaded
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode), untorch.stream(stream):
            y = torch.from_dlpack(program(x)) * 2
        for seed in range(3):
            x.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            close(y, reference(module, x) * 2)
            program(torch.ones(8, 64, device="cuda"))  # other memory than the graph's
            close(y, reference(module, x) * 2)


def test_a_strict_capture_with_inputs_still_kept(mlp: tuple[Path, nn.Module]) -> None:
    """Inputs of earlier calls that are still kept for the GPU do not break a capture in CUDA's strictest mode."""
    path, module = mlp
    stream = torch.cuda.Stream()
    with untorch.load(path) as program:
        x = torch.randn(8, 64, device="cuda")
        torch.cuda.synchronize()
        with untorch.stream(stream):
            program(x)
        torch.cuda.synchronize()
        program(x)  # on a stream of the library's own: x is kept until the GPU has read it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"), untorch.stream(stream):
            y = torch.from_dlpack(program(x)) * 2
        graph.replay()
        close(y, reference(module, x) * 2)


def test_what_a_capture_refuses(mlp: tuple[Path, nn.Module], noise: Path) -> None:
    """In a capture of the caller's, an input on the CPU and random numbers are errors; the capture goes on."""
    path, module = mlp
    stream = torch.cuda.Stream()
    with untorch.load(path) as program, untorch.load(noise) as random, untorch.stream(stream):
        x, ones_ = torch.randn(4, 64, device="cuda"), torch.ones(4096, device="cuda")
        program(x), random(ones_)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            with pytest.raises(untorch.InvalidArgumentError, match="is in the CPU's memory, and the stream is being"):
                program(np.ones((4, 64), np.float32))
            with pytest.raises(untorch.UnsupportedError, match=r"let untorch capture the graph \(method.graph\)"):
                random(ones_)
            y = torch.from_dlpack(program(x)) + 0
        graph.replay()
        close(y, reference(module, x))


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_capture_of_cupys(either_mlp: tuple[Path, nn.Module], mode: str) -> None:
    """The same into a graph of cupy's, with ``out=`` a buffer of the caller's."""
    cupy = pytest.importorskip("cupy")
    path, module = either_mlp
    stream = cupy.cuda.Stream(non_blocking=True)
    with untorch.load(path) as program, stream, untorch.stream(stream):
        x, out = cupy.zeros((8, 64), cupy.float32), cupy.zeros((8, 32), cupy.float32)
        program(x, out=out)
        stream.synchronize()
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        try:
            program(x, out=out)
        finally:
            graph = stream.end_capture()
        for seed in range(3):
            host = np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32)
            x.set(host, stream=stream)
            graph.launch(stream)
            close(out.get(stream=stream), reference(module, host))


def test_streams_of_cuda_core(chain: Path) -> None:
    """A stream of cuda.core, by its ``__cuda_stream__``."""
    core = pytest.importorskip("cuda.core")
    if not hasattr(core, "Device"):
        core = pytest.importorskip("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    handle = int(stream.handle)
    with untorch.load(chain) as program, torch.cuda.stream(torch.cuda.ExternalStream(handle)), untorch.stream(stream):
        assert _core.call_stream(0) == handle
        total, _ = program(ones(), ones())
        assert total.__cuda_array_interface__["stream"] == handle
        assert (torch.from_dlpack(total) == 21).all()
        stream.sync()


class Green:
    """A green context with some of the num_sms, and a stream of it."""

    def __init__(self, num_sms: int) -> None:
        self.driver = pytest.importorskip("cuda.bindings.driver")
        d = self.driver
        torch.cuda.synchronize()
        (device,) = self.ask(d.cuDeviceGet(0))
        (resource,) = self.ask(d.cuDeviceGetDevResource(device, d.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
        groups, *_ = self.ask(d.cuDevSmResourceSplitByCount(1, resource, 0, num_sms))
        self.num_sms = groups[0].sm.smCount
        self.all = resource.sm.smCount
        (description,) = self.ask(d.cuDevResourceGenerateDesc([groups[0]], 1))
        default_stream = non_blocking = 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING
        (self.context,) = self.ask(d.cuGreenCtxCreate(description, device, default_stream))
        (self.stream,) = self.ask(d.cuGreenCtxStreamCreate(self.context, non_blocking, 0))

    @staticmethod
    def ask(answer: Any) -> tuple[Any, ...]:
        code, *rest = answer
        if int(code) != 0:
            pytest.skip(f"the driver refuses green contexts here: {code!r}")
        return tuple(rest)

    def close(self) -> None:
        self.driver.cuStreamSynchronize(self.stream)
        self.driver.cuStreamDestroy(self.stream)
        self.driver.cuGreenCtxDestroy(self.context)


@pytest.mark.parametrize("current", ["primary", "green"])
def test_a_green_contexts_stream(mlp: tuple[Path, nn.Module], chain: Path, current: str) -> None:
    """Calls on a stream of a green context compute what they do elsewhere, whichever context is current; it stays so."""
    path, module = mlp
    given = torch.randn(16, 64, device="cuda")
    x, y = View(given), View(ones())  # torch itself is asked for nothing in the green context
    torch.cuda.synchronize()
    green = Green(8)
    try:
        assert green.num_sms < green.all
        driver = green.driver
        with untorch.load(path) as program, untorch.load(chain) as long:
            (before,) = green.ask(driver.cuCtxGetCurrent())
            if current == "green":
                (context,) = green.ask(driver.cuCtxFromGreenCtx(green.context))
                green.ask(driver.cuCtxSetCurrent(context))
            (during,) = green.ask(driver.cuCtxGetCurrent())
            try:
                with untorch.stream(int(green.stream)):
                    results = [program(x).numpy() for _ in range(3)]
                    totals = [long(y, y)[0].numpy() for _ in range(3)]
                    with program.forward.graph(x) as graph:
                        results += [graph(x).numpy() for _ in range(3)]
                (after,) = green.ask(driver.cuCtxGetCurrent())
            finally:
                driver.cuCtxSetCurrent(before)
        assert int(after) == int(during)
        for result in results:
            close(result, reference(module, given))
        for total in totals:
            assert (total == 21).all()
    finally:
        green.close()


@pytest.mark.parametrize("runners", [1, 4])
def test_eight_threads_with_four_streams_each(chain: Path, runners: int) -> None:
    """One program from 32 streams at once: every call has the values that its own thread gave it, on its own stream."""
    with untorch.load(chain, num_runners=runners) as program:

        def work(number: int) -> None:
            streams = [torch.cuda.Stream() for _ in range(4)]
            graph = program.forward.graph(ones(), ones()) if number % 2 else None
            for i in range(32):
                stream = streams[i % 4]
                with torch.cuda.stream(stream), untorch.stream(stream):
                    value = float(1000 * number + i)
                    y = ones(value=float(i % 5))
                    if graph is not None and i % 3 == 0:
                        total, parts = graph(ones(value=value), y)
                    else:
                        total, parts = program(ones(value=value), y)
                    assert (torch.from_dlpack(total) == value + 20 * (i % 5)).all()
                    assert (torch.from_dlpack(parts["double"]) == 2 * value).all()
            if graph is not None:
                graph.close()

        in_threads(8, work)


@pytest.mark.parametrize("runners", [1, 4])
def test_eight_threads_with_numpy(chain: Path, runners: int) -> None:
    """The same with numpy arrays and no stream of the caller's: each thread has its own."""
    handles: set[int] = set()
    gate = threading.Barrier(8)
    with untorch.load(chain, num_runners=runners) as program:

        def work(number: int) -> None:
            handles.add(_core.call_stream(0))
            gate.wait(60)  # a thread that ends leaves its stream to the next
            for i in range(16):
                x, y = np.full(N, 100 * number + i, np.float32), np.full(N, i % 5, np.float32)
                total, parts = program(x, y)
                assert (total == x + 20 * y).all() and (parts["double"] == 2 * x).all()

        in_threads(8, work)
    assert len(handles) == 8


@pytest.mark.parametrize("what", ["program", "graph"])
def test_closing_waits_without_the_interpreter_lock(counter: Path, what: str) -> None:
    """Memory goes back to the driver, which waits for the GPU; other threads of Python go on."""
    program = untorch.load(counter)
    x = torch.ones(4, device="cuda")
    program.forward(x)
    closed: Any = program.forward.graph(x) if what == "graph" else program
    torch.cuda.synchronize()
    steps, stop = [0], threading.Event()

    def count() -> None:
        while not stop.wait(0.001):
            steps[0] += 1

    thread = threading.Thread(target=count)
    with Spin(torch.cuda.Stream(), seconds=0.5):
        thread.start()
        before = steps[0]
        closed.close()
        during = steps[0] - before
    stop.set()
    thread.join()
    program.close()
    assert during > 50
