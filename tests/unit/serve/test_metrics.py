"""Metrics: what was told is counted before anything is read."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from untorch.serve.errors import QueueFullError
from untorch.serve.metrics import Metrics


def value(metrics: Metrics, name: str) -> float:
    """The sum of a metric's values."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics.render().decode(), re.MULTILINE)
    return sum(float(one) for one in found)


def call(metrics: Metrics, error: BaseException | None = None) -> None:
    with contextlib.suppress(BaseException), metrics.request("http") as watch:
        watch.model = "m"
        if error is not None:
            raise error


def test_calls_are_counted_when_they_are_read() -> None:
    metrics = Metrics()
    for _ in range(3):
        call(metrics)
    assert value(metrics, "untorch_requests_total") == 3
    call(metrics)
    assert metrics.statistics("m").success.count == 4
    call(metrics)
    metrics.count_response("POST", "/", 200, 0.1)
    assert value(metrics, "untorch_request_seconds_count") == 5
    assert value(metrics, "untorch_http_requests_total") == 1


def test_codes() -> None:
    metrics = Metrics()
    for error in (QueueFullError("full"), asyncio.CancelledError()):
        call(metrics, error)
    text = metrics.render().decode()
    assert 'untorch_requests_total{code="resource_exhausted",model="m",protocol="http"} 1.0' in text
    assert 'untorch_requests_total{code="cancelled",model="m",protocol="http"} 1.0' in text
    assert metrics.statistics("m").fail.count == 2


def test_a_batchers_observer() -> None:
    metrics = Metrics()
    observer = metrics.observer("m")
    observer.waited(0.5)
    observer.batch(2, 6, 0.25)
    observer.split(ValueError())
    assert value(metrics, "untorch_queue_seconds_sum") == 0.5
    assert value(metrics, "untorch_batch_rows_sum") == 6
    assert value(metrics, "untorch_batch_splits_total") == 1
    statistics = metrics.statistics("m")
    assert (statistics.queue.count, statistics.compute.count, statistics.executions[6].count) == (1, 2, 1)
    assert statistics.last > 1.7e12


def test_what_is_told_does_not_pile_up() -> None:
    """Without anybody who reads, in threads that have no event loop as in those that have one."""
    metrics, told = Metrics(), 0

    def count() -> None:
        nonlocal told
        told += 1

    for _ in range(1000):
        metrics.later(count)
    assert told >= 936

    async def many() -> None:
        for _ in range(1000):
            metrics.later(count)
            await asyncio.sleep(0)

    asyncio.run(many())
    assert told >= 1936


def test_with_several_workers_any_of_them_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an event loop's next turn counts."""
    metrics, told = Metrics(), []
    monkeypatch.setattr(metrics, "_is_shared", True)

    async def tell() -> None:
        metrics.later(told.append, 1)
        assert not told
        await asyncio.sleep(0)
        assert told == [1]

    asyncio.run(tell())
