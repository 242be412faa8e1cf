"""The batcher: results are never mixed, one call's error is its own, queues are bounded, deadlines hold."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.runtime.errors import ClosedError, InvalidArgumentError, ModelError
from untorch.serve.batching import Batcher, Call, Observer
from untorch.serve.errors import DeadlineError, QueueFullError


class Log(Observer):
    """What the batcher told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.splits = 0

    def batch(self, calls: int, rows: int, seconds: float) -> None:
        self.batches.append((calls, rows))

    def split(self, error: BaseException) -> None:
        self.splits += 1


class Gate:
    """A method that waits until it is opened: calls pile up behind it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        self.entered.set()
        assert self.open.wait(10)
        return [inputs[0] * 2]


def rows(*values: float) -> list[Any]:
    return [np.array(values, dtype=np.float32)[:, None]]


def collect(batcher: Batcher, many: Sequence[Sequence[Any]], timeout: float | None = None) -> list[Call]:
    """All calls at once, from this thread; returns when all are done."""
    done, counter = threading.Event(), iter(range(len(many)))
    left = len(many)

    def finish(_: Call) -> None:
        if next(counter) == left - 1:
            done.set()

    calls = [batcher.submit(inputs, finish, timeout) for inputs in many]
    assert done.wait(20)
    return calls


def test_calls_are_joined_and_split() -> None:
    gate, log = Gate(), Log()
    batcher = Batcher(gate, joins=True, max_batch_size=4, observer=log)
    first = batcher.submit(rows(0), lambda call: None)
    assert gate.entered.wait(5)
    others = [batcher.submit(rows(i, -i), lambda call: None) for i in range(1, 5)]
    assert (batcher.waiting, batcher.running) == (4, 1)
    gate.open.set()
    batcher.close()
    assert [call.outputs[0].ravel().tolist() for call in (first, *others)] == [
        [0], [2, -2], [4, -4], [6, -6], [8, -8],
    ]  # fmt: skip
    assert log.batches == [(1, 1), (2, 4), (2, 4)]


def test_a_full_batch_does_not_wait() -> None:
    log = Log()
    batcher = Batcher(lambda inputs: [inputs[0]], joins=True, max_batch_size=8, max_wait=60, observer=log)
    collect(batcher, [rows(i) for i in range(8)])  # within 20 seconds
    batcher.close()
    assert log.batches == [(8, 8)]


def test_a_batch_that_is_not_full_waits() -> None:
    log = Log()
    batcher = Batcher(lambda inputs: [inputs[0]], joins=True, max_batch_size=8, max_wait=0.2, observer=log)
    begin = time.monotonic()
    collect(batcher, [rows(1)])
    assert time.monotonic() - begin > 0.19
    batcher.close()
    assert log.batches == [(1, 1)]


@pytest.mark.parametrize(
    "one",
    [
        [np.zeros((2, 3), np.float32)],  # another shape
        [np.zeros((2, 1), np.float64)],  # another dtype
        [np.zeros((2, 1), np.float32), np.zeros((2,), np.int64)],  # more inputs
        [np.zeros((2, 1), np.float32), np.zeros((3, 1), np.float32)],  # rows that differ
        [np.zeros((), np.float32)],
        [np.zeros((0, 1), np.float32)],
        [np.zeros((9, 1), np.float32)],  # more rows than a batch has
        [],
    ],
)
def test_what_differs_is_not_joined(one: list[Any]) -> None:
    seen: list[Any] = []
    gate = threading.Event()

    def form(inputs: Sequence[Any]) -> Any:
        return [(array.shape, array.dtype) for array in inputs]

    def run(inputs: Sequence[Any]) -> list[Any]:
        gate.wait(5)
        seen.append(form(inputs))
        return [inputs[0] if inputs else np.zeros(1)]

    batcher = Batcher(run, joins=True, max_batch_size=8)
    calls = [batcher.submit(inputs, lambda call: None) for inputs in (rows(1), one, rows(2))]
    gate.set()
    batcher.close()
    assert [call.error for call in calls] == [None] * 3
    assert form(one) in seen


def test_a_method_that_may_not_be_joined() -> None:
    log = Log()
    batcher = Batcher(lambda inputs: [inputs[0].sum(0, keepdims=True)], joins=False, observer=log)
    calls = collect(batcher, [rows(i, i) for i in range(50)])
    batcher.close()
    assert [float(call.outputs[0].item()) for call in calls] == [2.0 * i for i in range(50)]
    assert {calls for calls, _ in log.batches} == {1}


def test_an_error_is_one_calls_own() -> None:
    gate = threading.Event()

    def run(inputs: Sequence[Any]) -> list[Any]:
        gate.wait(5)
        if (inputs[0] < 0).any():
            raise InvalidArgumentError("a negative number")
        return [inputs[0] + 1]

    log = Log()
    batcher = Batcher(run, joins=True, max_batch_size=32, observer=log)
    batcher.submit(rows(5), lambda call: None)
    calls = [batcher.submit(rows(-1 if i == 3 else i), lambda call: None) for i in range(8)]
    gate.set()
    batcher.close()
    assert log.splits >= 1
    for i, call in enumerate(calls):
        if i == 3:
            assert str(call.error) == "a negative number"
        else:
            assert call.outputs[0].tolist() == [[i + 1]]


def test_outputs_with_other_rows_are_run_alone() -> None:
    """A method whose shapes the manifest describes wrongly."""
    gate = threading.Event()

    def run(inputs: Sequence[Any]) -> list[Any]:
        gate.wait(5)
        return [inputs[0].mean(0, keepdims=True)]

    log = Log()
    batcher = Batcher(run, joins=True, observer=log)
    batcher.submit(rows(0), lambda call: None)
    calls = [batcher.submit(rows(i, i), lambda call: None) for i in range(4)]
    gate.set()
    batcher.close()
    assert log.splits == 1
    assert [float(call.outputs[0].item()) for call in calls] == [0, 1, 2, 3]


def test_a_full_queue_refuses() -> None:
    gate = Gate()
    batcher = Batcher(gate, joins=True, max_batch_size=1, max_queue=2, name="m")
    batcher.submit(rows(1), lambda call: None)
    assert gate.entered.wait(5)
    for i in range(2):
        batcher.submit(rows(i), lambda call: None)
    with pytest.raises(QueueFullError, match=r"model 'm': 2 calls wait already: try again later"):
        batcher.submit(rows(3), lambda call: None)
    gate.open.set()
    batcher.close()
    with pytest.raises(ClosedError, match="model 'm' is unloaded"):
        batcher.submit(rows(3), lambda call: None)


def test_deadlines() -> None:
    gate = Gate()
    batcher = Batcher(gate, joins=True, name="m")

    async def main() -> None:
        blocker = asyncio.create_task(batcher.infer(rows(1)))
        await asyncio.to_thread(gate.entered.wait, 5)
        begin = time.monotonic()
        with pytest.raises(DeadlineError, match=r"model 'm': the call was not computed within 0.05 s"):
            await batcher.infer(rows(2), timeout=0.05)
        assert time.monotonic() - begin < 1  # it does not wait for the call that runs
        gate.open.set()
        assert (await blocker)[0].tolist() == [[2]]
        assert (await batcher.infer(rows(4), timeout=5))[0].tolist() == [[8]]

    asyncio.run(main())
    batcher.close()


def test_a_call_past_its_deadline_is_not_computed() -> None:
    gate, log = Gate(), Log()
    batcher = Batcher(gate, joins=True, observer=log)
    batcher.submit(rows(1), lambda call: None)
    assert gate.entered.wait(5)
    late = batcher.submit(rows(2), lambda call: None, timeout=0.01)
    time.sleep(0.05)
    gate.open.set()
    batcher.close()
    assert isinstance(late.error, DeadlineError)
    assert log.batches == [(1, 1)]


def test_a_cancelled_call_is_not_computed() -> None:
    gate, log = Gate(), Log()
    batcher = Batcher(gate, joins=True, observer=log)

    async def main() -> None:
        blocker = asyncio.create_task(batcher.infer(rows(1)))
        await asyncio.to_thread(gate.entered.wait, 5)
        gone = asyncio.create_task(batcher.infer(rows(2)))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        gate.open.set()
        await blocker

    asyncio.run(main())
    batcher.close()
    assert log.batches == [(1, 1)]


def test_a_callback_that_fails_ends_no_thread() -> None:
    batcher = Batcher(lambda inputs: [inputs[0]], joins=True)
    batcher.submit(rows(1), lambda call: 1 / 0)  # type: ignore[arg-type]
    assert collect(batcher, [rows(2)])[0].outputs is not None
    batcher.close()


def test_a_loop_that_is_gone_ends_no_thread() -> None:
    gate = Gate()
    batcher = Batcher(gate, joins=True)

    async def leave() -> None:
        task = asyncio.create_task(batcher.infer(rows(1)))
        await asyncio.to_thread(gate.entered.wait, 5)
        task.cancel()

    asyncio.run(leave())
    gate.open.set()
    assert asyncio.run(batcher.infer(rows(3)))[0].tolist() == [[6]]
    batcher.close()


def test_kinds_take_turns() -> None:
    """Many calls of one kind do not keep one of another kind waiting."""
    order: list[int] = []
    gate = threading.Event()

    def run(inputs: Sequence[Any]) -> list[Any]:
        gate.wait(5)
        order.append(inputs[0].shape[1])
        return [inputs[0]]

    batcher = Batcher(run, joins=True, max_batch_size=2)
    for _ in range(20):
        batcher.submit([np.zeros((1, 1), np.float32)], lambda call: None)
    batcher.submit([np.zeros((1, 7), np.float32)], lambda call: None)
    gate.set()
    batcher.close()
    assert order.index(7) <= 2


def test_no_call_is_left_when_waits_end_as_others_begin() -> None:
    """Runners that stop waiting for a batch to fill, while calls come, are woken, and not for nothing for ever."""
    batcher = Batcher(lambda inputs: [inputs[0] + 1], joins=True, max_batch_size=4, max_wait=2e-4, runners=4)
    done: list[Call] = []
    finished = threading.Semaphore(0)

    def finish(call: Call) -> None:
        done.append(call)
        finished.release()

    for i in range(3000):
        batcher.submit(rows(i), finish)
        if i % 3 == 0:
            time.sleep(2e-4 * (i % 7) / 4)
    for _ in range(3000):
        assert finished.acquire(timeout=10)
    assert sorted(float(call.outputs[0][0, 0]) for call in done if call.outputs) == [i + 1.0 for i in range(3000)]
    eventually_idle(batcher)
    batcher.close()


def eventually_idle(batcher: Batcher) -> None:
    end = time.monotonic() + 10
    while batcher._idle != 4 or not batcher._wakes.empty():
        assert time.monotonic() < end, (batcher._idle, batcher._wakes.qsize())
        time.sleep(1e-3)
    assert (batcher.waiting, batcher.running) == (0, 0)


def test_a_late_calls_callback_may_submit() -> None:
    gate = Gate()
    batcher = Batcher(gate, joins=False)
    batcher.submit(rows(1), lambda call: None)
    assert gate.entered.wait(10)
    again, late = threading.Event(), threading.Event()

    def retry(call: Call) -> None:
        assert isinstance(call.error, DeadlineError)
        late.set()
        batcher.submit(rows(3), lambda call: again.set())

    batcher.submit(rows(2), retry, timeout=1e-6)
    gate.open.set()
    assert late.wait(10)
    assert again.wait(10)
    batcher.close()


def test_runners_work_at_a_time() -> None:
    together = threading.Barrier(3)

    def run(inputs: Sequence[Any]) -> list[Any]:
        together.wait(5)
        return [inputs[0]]

    batcher = Batcher(run, joins=True, max_batch_size=2, runners=3)
    calls = collect(batcher, [[np.zeros((1, i + 1))] for i in range(3)])
    batcher.close()
    assert [call.error for call in calls] == [None] * 3


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 3]), st.booleans()), min_size=1, max_size=60),
    most=st.integers(1, 9),
    runners=st.integers(1, 3),
    max_wait=st.sampled_from([0.0, 0.001]),
)
def test_each_call_gets_what_it_would_get_alone(
    sizes: list[tuple[int, int, bool]], most: int, runners: int, max_wait: float
) -> None:
    """Whatever rows, widths and failures: outputs are the function of the call's own rows."""

    def run(inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if (x < 0).any():
            raise ModelError("negative")
        assert len(x) <= most or len(x) in {count for count, _, _ in sizes}
        return [x * 3, x.sum(axis=1)]

    batcher = Batcher(run, joins=True, max_batch_size=most, max_wait=max_wait, runners=runners)
    many = []
    for i, (count, width, fails) in enumerate(sizes):
        x = np.arange(count * width, dtype=np.float64).reshape(count, width) + 100 * i
        many.append([-x - 1 if fails else x])
    calls = collect(batcher, many)
    batcher.close()
    for call, (x,), (count, _, fails) in zip(calls, many, sizes, strict=True):
        if fails and count:
            assert str(call.error) == "negative"
        else:
            assert call.outputs is not None
            assert call.outputs[0].tolist() == (x * 3).tolist()
            assert call.outputs[1].tolist() == x.sum(axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loops", "threads"),
    [
        pytest.param([40_000], [480_000, 480_000], id="mostly threads"),
        # Futures of an event loop cost four times as much.
        pytest.param([250_000] * 2, [250_000] * 2, marks=pytest.mark.exhaustive, id="as many loops"),
    ],
)
def test_a_million_calls_are_never_mixed(loops: list[int], threads: list[int]) -> None:
    """Calls of event loops in threads of their own and of plain threads, of one to three rows, over three runners."""
    total = sum([*loops, *threads])
    batcher = Batcher(
        lambda inputs: [inputs[0] * 2 + 1], joins=True, max_batch_size=256, max_queue=total, runners=3
    )  # fmt: skip
    # The first value is the call's number. Inputs are views: making arrays is not what is tested.
    numbers = np.arange(total + 2, dtype=np.int64)
    finished: list[int] = []
    wrong: list[Any] = []

    def check(number: int, outputs: list[Any] | None) -> None:
        rows = 1 + number % 3
        (found,) = outputs or [None]
        if found is None or len(found) != rows or (found[0], found[-1]) != (2 * number + 1, 2 * (number + rows) - 1):
            wrong.append((number, outputs))

    def plain(calls: range) -> None:
        window, ended = threading.Semaphore(4096), itertools.count()

        def done(call: Call) -> None:
            check(int(call.inputs[0][0]), call.outputs)
            next(ended)
            window.release()

        for number in calls:
            window.acquire()
            batcher.submit((numbers[number : number + 1 + number % 3],), done)
        for _ in range(4096):
            window.acquire()
        finished.append(next(ended))

    async def client(calls: range) -> int:
        for number in calls:
            check(number, await batcher.infer((numbers[number : number + 1 + number % 3],)))
        return len(calls)

    def loop(calls: range) -> None:
        async def main() -> None:
            finished.append(sum(await asyncio.gather(*(client(calls[at::256]) for at in range(256)))))

        asyncio.run(main())

    sources, begin = [], 0
    for source, count in [*((loop, count) for count in loops), *((plain, count) for count in threads)]:
        sources.append(threading.Thread(target=source, args=(range(begin, begin + count),)))
        begin += count
    for thread in sources:
        thread.start()
    for thread in sources:
        thread.join()
    batcher.close()
    assert wrong == []
    assert sorted(finished) == sorted([*loops, *threads])
