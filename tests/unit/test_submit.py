"""Method.submit: calls from event loops, on a bounded pool of threads."""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.runtime import submit as module
from untorch.runtime.submit import Lane, submit

X = np.ones((2, 4), np.float32)


class Fake:
    """A method that does what the test says."""

    name = "fake"

    def __init__(self, call: Callable[..., Any], device: str = "cpu") -> None:
        self.device = device
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def fake(call: Callable[..., Any], device: str = "cpu") -> Any:
    return Fake(call, device)


class Gate:
    """Calls that wait until the test lets them go on; what ran, and how many at a time."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.lock = threading.Lock()
        self.begun: list[Any] = []
        self.running = self.most = 0

    def __call__(self, value: Any) -> Any:
        with self.lock:
            self.begun.append(value)
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.open.wait(30)
        with self.lock:
            self.running -= 1
        return value

    async def until(self, count: int) -> None:
        for _ in range(3000):
            if len(self.begun) >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(self.begun)} calls began, expected {count}")


@pytest.fixture
def program(own_package: pathlib.Path) -> Iterator[untorch.Program]:
    with untorch.load(own_package, num_runners=2, num_threads=1) as program:
        yield program


def test_the_result_is_the_calls(program: untorch.Program) -> None:
    async def main() -> None:
        future = program.linear.submit(X)
        assert isinstance(future, asyncio.Future)
        np.testing.assert_array_equal(await future, program.linear(X))
        buffer = np.empty((2, 3), np.float32)
        assert await program.linear.submit(X, out=buffer) is buffer

    asyncio.run(main())


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_many_in_flight(program: untorch.Program, loops: str) -> None:
    async def main() -> None:
        before = threading.active_count()
        inputs = [np.full((1, 4), i, np.float32) for i in range(2000)]
        results = await asyncio.gather(*(program.linear.submit(x) for x in inputs))
        for x, y in zip(inputs, results, strict=True):
            np.testing.assert_array_equal(y, x @ np.arange(12, dtype=np.float32).reshape(3, 4).T + [10, 20, 30])
        assert threading.active_count() - before <= 2  # as many as there are runners

    if loops == "uvloop":
        pytest.importorskip("uvloop").run(main())
    else:
        asyncio.run(main())


def test_errors_are_the_calls(program: untorch.Program) -> None:
    async def main() -> None:
        with pytest.raises(untorch.InvalidArgumentError) as called:
            program.linear(X[:, :3].copy())
        with pytest.raises(untorch.InvalidArgumentError) as awaited:
            await program.linear.submit(X[:, :3].copy())
        assert str(awaited.value) == str(called.value)
        with pytest.raises(untorch.ArgumentTypeError, match="missing|expected"):
            await program.linear.submit()
        np.testing.assert_array_equal(await program.linear.submit(X), program.linear(X))

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("now"), ZeroDivisionError("zero")])
def test_what_a_kernel_raises_reaches_the_caller(error: BaseException) -> None:
    def fails() -> None:
        raise error

    async def main() -> None:
        lane = Lane(1)
        with pytest.raises(type(error)) as raised:
            await submit(fake(fails), lane, (), {})
        assert raised.value is error
        assert await submit(fake(lambda: 1), lane, (), {}) == 1

    asyncio.run(main())


def test_a_stop_iteration_is_a_runtime_error() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="^the call raised StopIteration$"):
            await submit(fake(lambda: next(iter(()))), Lane(1), (), {})

    asyncio.run(main())


def test_a_closed_program(own_package: pathlib.Path) -> None:
    program = untorch.load(own_package)
    method = program.linear

    async def main() -> None:
        program.close()
        with pytest.raises(untorch.ClosedError):
            await method.submit(X)

    asyncio.run(main())


def test_outside_of_a_loop(program: untorch.Program) -> None:
    with pytest.raises(
        untorch.InvalidArgumentError,
        match="^method 'linear': submit needs a running event loop: await it in a coroutine, or call the method itself$",
    ):
        program.linear.submit(X)


def test_the_loop_runs_meanwhile() -> None:
    async def main() -> None:
        gate = Gate()
        future = submit(fake(gate), Lane(1), (1,), {})
        await gate.until(1)
        assert not future.done()
        gate.open.set()
        assert await future == 1

    asyncio.run(main())


def test_a_lane_runs_its_width_at_a_time_in_order() -> None:
    async def main() -> None:
        gate, other = Gate(), Gate()
        other.open.set()
        wide, narrow = Lane(3), Lane(1)
        first = [submit(fake(gate), wide, (i,), {}) for i in range(20)]
        await gate.until(3)
        # The others wait without a thread, so calls of another lane go on.
        assert await asyncio.gather(*(submit(fake(other), narrow, (i,), {}) for i in range(20))) == list(range(20))
        assert other.begun == list(range(20)) and other.most == 1
        assert len(gate.begun) == 3
        gate.open.set()
        assert await asyncio.gather(*first) == list(range(20))
        assert gate.most == 3 and sorted(gate.begun[:3]) == [0, 1, 2]

    asyncio.run(main())


def test_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pool", None)
    monkeypatch.setattr(module, "_MOST_THREADS", 4)

    async def main() -> None:
        gate = Gate()
        futures = [submit(fake(gate), Lane(2), (i,), {}) for i in range(50)]
        await gate.until(4)
        await asyncio.sleep(0.05)
        assert len(gate.begun) == 4
        gate.open.set()
        assert await asyncio.gather(*futures) == list(range(50))
        assert gate.most == 4

    try:
        asyncio.run(main())
    finally:
        assert module._pool is not None
        module._pool.shutdown()


@pytest.mark.slow
def test_a_cancelled_call_does_not_begin_and_keeps_no_arrays() -> None:
    async def main() -> None:
        gate, lane = Gate(), Lane(1)
        running = submit(fake(gate), lane, ("running",), {})
        array = np.ones(3)
        alive = weakref.ref(array)
        waiting = submit(fake(gate), lane, (array,), {})
        last = submit(fake(gate), lane, ("last",), {})
        await gate.until(1)
        running.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del array
        await asyncio.sleep(0)  # an iteration of the loop, for the future's callbacks
        gc.collect()
        assert alive() is None
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not last.done()  # the call that was cancelled while it ran has its place until it ends
        gate.open.set()
        assert await last == "last"
        assert gate.begun == ["running", "last"]

    asyncio.run(main())


def test_timeouts_leave_the_program_usable(program: untorch.Program) -> None:
    async def main() -> None:
        tasks = [asyncio.wait_for(program.linear.submit(X), 0.0005 * (i % 7)) for i in range(200)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} <= {np.ndarray, asyncio.TimeoutError, TimeoutError}
        np.testing.assert_array_equal(await program.linear.submit(X), program.linear(X))

    asyncio.run(main())


def test_a_loop_that_ends_leaves_the_lane_usable() -> None:
    gate, lane = Gate(), Lane(1)

    async def leave() -> None:
        submit(fake(gate), lane, (1,), {})
        submit(fake(gate), lane, (2,), {})
        await gate.until(1)

    async def again() -> Any:
        return await submit(fake(gate), lane, (3,), {})

    asyncio.run(leave())
    gate.open.set()
    assert asyncio.run(again()) == 3
    assert gate.begun == [1, 3]  # nobody waited for the second


def test_two_loops_on_two_threads(program: untorch.Program) -> None:
    errors: list[BaseException] = []

    async def main() -> None:
        for _ in range(50):
            results = await asyncio.gather(*(program.linear.submit(X) for _ in range(8)))
            for result in results:
                np.testing.assert_array_equal(result, program.linear(X))

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_calls_of_a_session_and_of_buffers_come_in_order(program: untorch.Program) -> None:
    x = np.zeros(4, np.float32)

    async def main(counter: Any) -> None:
        results = await asyncio.gather(*(counter.submit(x) for _ in range(100)))
        assert [result[0] for result in results] == list(range(1, 101))

    asyncio.run(main(program.counter))
    with program.session() as session:
        asyncio.run(main(session.counter))


def test_who_shares_a_lane(cache_package: pathlib.Path) -> None:
    with untorch.load(cache_package, num_runners=3) as program, program.session() as session:
        lanes = [program[name]._lane() for name in ("put", "get", "plain")]
        assert lanes[0] is lanes[1] is not lanes[2]
        assert [lane._width for lane in lanes] == [1, 1, 3]
        own = {session[name]._lane() for name in ("put", "get", "plain")}
        assert len(own) == 1 and own.pop() is not lanes[0]


def test_a_forked_child_submits(own_package: pathlib.Path) -> None:
    code = """
import asyncio, os, sys, threading
import numpy, untorch
from untorch.runtime.submit import Lane, submit

program = untorch.load(sys.argv[1], num_threads=1)
x = numpy.ones((2, 4), numpy.float32)
lane, go = Lane(1), threading.Event()

class Waits:
    name, device = "waits", "cpu"
    def __call__(self): go.wait(30)

class Answers(Waits):
    def __call__(self): return 7

async def answer():
    return (await program.linear.submit(x)).tolist(), await submit(Answers(), lane, (), {})

async def main():
    await program.linear.submit(x)
    futures = [submit(Waits(), lane, (), {}), submit(Waits(), lane, (), {})]
    child = os.fork()
    if child == 0:
        asyncio.events._set_running_loop(None)
        print(asyncio.run(answer()), flush=True)
        os._exit(0)
    status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
    go.set()
    await asyncio.gather(*futures)
    print(status[1], flush=True)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(own_package)], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout == "([[16.0, 42.0, 68.0], [16.0, 42.0, 68.0]], 7)\n0\n"


def test_import_brings_neither_asyncio_nor_threads_for_calls() -> None:
    code = "import sys, untorch; print([m for m in ('asyncio', 'concurrent', 'untorch.runtime.submit') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_process_ends_while_calls_wait(own_package: pathlib.Path) -> None:
    code = """
import asyncio, sys, numpy, untorch
program = untorch.load(sys.argv[1], num_threads=1)
async def main():
    for _ in range(500):
        program.linear.submit(numpy.ones((64, 4), numpy.float32))
asyncio.run(main())
print("end")
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(own_package)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert time.monotonic() - begin < 30


class Core:
    """The functions of the native module that need a GPU, and what they were called with."""

    Tensor = untorch.Tensor

    def __init__(self, caller: tuple[int | None, Any]) -> None:
        self.settings = threading.local()
        self.settings.value = caller
        self.log: list[Any] = []

    def exchange_stream(self, handle: int | None, owner: Any) -> tuple[int | None, Any]:
        before = getattr(self.settings, "value", (None, None))
        self.settings.value = (handle, owner)
        return before

    def call_stream(self, index: int) -> int:
        handle = self.settings.value[0]
        return 0x77 if handle is None else handle or 1

    def synchronize(self, index: int, stream: int) -> None:
        self.log.append(("synchronize", index, stream, threading.get_ident() == MAIN))


MAIN = threading.get_ident()


class GpuArray:
    """A producer that notes on which thread it was asked, and for which stream."""

    def __init__(self, old: bool = False) -> None:
        self.asked: list[Any] = []
        self.old = old

    def __dlpack__(self, *, stream: int, **more: Any) -> Any:
        if self.old and more:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked.append((stream, threading.get_ident() == MAIN, more))
        return "capsule"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)


@pytest.mark.parametrize(
    ("caller", "handle", "number"), [((None, None), 0x77, 0x77), ((0, "mine"), 0, 1), ((9, "mine"), 9, 9)]
)
def test_on_a_gpu_calls_run_on_the_submitters_stream(
    monkeypatch: pytest.MonkeyPatch, caller: Any, handle: int, number: int
) -> None:
    core = Core(caller)
    monkeypatch.setattr(module, "_core", core)
    given, old = GpuArray(), GpuArray(old=True)

    def call(x: Any, items: Any, *, flag: Any) -> Any:
        core.log.append(("call", core.exchange_stream(*core.settings.value), threading.get_ident() == MAIN))
        assert x.__dlpack__(stream=1, max_version=(1, 0)) == "capsule" and x.__dlpack_device__() == (2, 1)
        assert items[0] is X and items[1]["old"].__dlpack__() == "capsule" and flag is True
        return "result"

    async def main() -> None:
        future = submit(fake(call, "cuda:1"), Lane(1), (given, (X, {"old": old})), {"flag": True})
        assert core.settings.value == caller  # as it was
        assert given.asked == [(number, True, {"max_version": (1, 0)})] and old.asked == [(number, True, {})]
        assert await future == "result"

    asyncio.run(main())
    assert core.log == [("call", (handle, caller[1]), False), ("synchronize", 1, number, False)]


def test_the_process_has_one_pool() -> None:
    async def main() -> None:
        await submit(fake(os.getpid), Lane(1), (), {})
        pool = module._pool
        await submit(fake(os.getpid), Lane(1), (), {})
        assert module._pool is pool is not None

    asyncio.run(main())
