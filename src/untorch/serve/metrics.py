"""Prometheus metrics: requests, queues, batches, memory, language models. One registry a server.

With several workers, each keeps its values in files of ``PROMETHEUS_MULTIPROC_DIR``, and any of them answers for all.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from untorch.runtime.errors import UntorchError
from untorch.serve.batching import Observer
from untorch.serve.errors import status_of
from untorch.serve.model import MethodModel
from untorch.serve.statistics import Statistics

if TYPE_CHECKING:
    from untorch.serve.repository import Repository

__all__ = ["CONTENT_TYPE", "Metrics", "Watch", "soon"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Counters of EngineStats, and what they count.
_LLM_COUNTERS = {
    "requests": "Requests that came.", "finished": "Requests that ended.", "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that the prefix cache had.",
    "prefix_hits": "Prompts that the prefix cache had a beginning of.",
    "generated_tokens": "Tokens that were generated.",
    "preemptions": "Sequences that gave their pages back.", "steps": "Steps of the model.",
    "drafts": "Drafts of speculative decoding, a sequence and step.", "draft_tokens": "Tokens of drafts.",
    "accepted_tokens": "Tokens of drafts that were accepted.",
}  # fmt: skip
# Counting a call takes longer than a small model: it is done for many at a time, and not between a call and its answer.
_MOST_PENDING = 64
_MEMORY = ("mapped", "weights", "state", "kv_cache", "dequantized", "tensors", "reserved", "free", "total")


def soon(function: Callable[..., None], *arguments: Any) -> None:
    """Calls it in the event loop's next turn, when an answer that is written now has been sent; without a loop, now."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        function(*arguments)
    else:
        loop.call_soon(function, *arguments)


class Watch:
    """Counts and times what is done within it. ``model`` becomes a label: only names of models that are there."""

    __slots__ = ("_begin", "_metrics", "_protocol", "model")

    def __init__(self, metrics: Metrics, protocol: str) -> None:
        self.model = "unknown"
        self._metrics = metrics
        self._protocol = protocol

    def __enter__(self) -> Watch:
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin
        code = "ok"
        if error is not None:
            code = status_of(error)[1].lower() if isinstance(error, Exception) else "cancelled"
        self._metrics.later(self._metrics.count_call, self.model, self._protocol, code, seconds)


class Metrics:
    """What is counted and measured."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._requests = self._counter("untorch_requests", "Calls of models.", "model", "protocol", "code")
        self._request_seconds = self._histogram(
            "untorch_request_seconds", "Seconds from a parsed request to its outputs.", _SECONDS, "model", "protocol"
        )
        self._queue_seconds = self._histogram(
            "untorch_queue_seconds", "Seconds that a call waited.", _SECONDS, "model"
        )  # fmt: skip
        self._batch_calls = self._histogram("untorch_batch_calls", "Calls of a batch.", _ROWS, "model")
        self._batch_rows = self._histogram("untorch_batch_rows", "Rows of a batch.", _ROWS, "model")
        self._batch_seconds = self._histogram(
            "untorch_batch_seconds", "Seconds that a batch was computed.", _SECONDS, "model"
        )  # fmt: skip
        self._splits = self._counter(
            "untorch_batch_splits", "Batches that failed, and were run call by call.", "model"
        )  # fmt: skip
        self._waiting = self._gauge("untorch_queue_calls", "Calls that wait.", "model")
        self._running = self._gauge("untorch_running_calls", "Calls that are computed.", "model")
        self._loaded = self._gauge("untorch_models_loaded", "Models that can be called.")
        self._memory = self._gauge("untorch_memory_bytes", "Memory of a package, by kind.", "package", "kind")
        self._http = self._counter("untorch_http_requests", "HTTP responses.", "method", "route", "code")
        self._http_seconds = self._histogram(
            "untorch_http_seconds", "Seconds from a request's head to the end of its response.", _SECONDS, "route"
        )
        self._llm = {
            name: self._counter(f"untorch_llm_{name}", text, "model") for name, text in _LLM_COUNTERS.items()
        }  # fmt: skip
        self._llm_running = self._gauge("untorch_llm_running", "Sequences that are computed.", "model")
        self._llm_waiting = self._gauge("untorch_llm_waiting", "Requests that wait.", "model")
        self._llm_kv = self._gauge("untorch_llm_kv_usage", "The part of the pages that is in use, 0 to 1.", "model")
        self._llm_first = self._histogram(
            "untorch_llm_time_to_first_token_seconds", "Seconds to the first token.", _SECONDS, "model"
        )
        self._llm_each = self._histogram(
            "untorch_llm_time_per_output_token_seconds", "Seconds of each further token.", _SECONDS, "model"
        )
        self._seen: dict[str, dict[str, int]] = {}
        self._children: dict[tuple[Any, ...], Any] = {}
        self._statistics: dict[str, Statistics] = {}
        self._pending: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._flushing = threading.Lock()

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls what counts, before anything is read. Any thread may call this."""
        if self._is_shared:  # and another worker may read
            soon(function, *arguments)
            return
        self._pending.append((function, arguments))
        if len(self._pending) >= _MOST_PENDING:
            soon(self._flush)

    def _flush(self) -> None:
        with self._flushing:
            while self._pending:
                function, arguments = self._pending.popleft()
                function(*arguments)

    def request(self, protocol: str) -> Watch:
        """Counts and times a call of a model."""
        return Watch(self, protocol)

    def count_call(self, model: str, protocol: str, code: str, seconds: float) -> None:
        """Counts a call of a model."""
        self._child(self._requests, model, protocol, code).inc()
        self._child(self._request_seconds, model, protocol).observe(seconds)
        self._statistics_of(model).request(code == "ok", seconds)

    def statistics(self, model: str) -> Statistics:
        """Of a model, in this process."""
        self._flush()
        return self._statistics_of(model)

    def _statistics_of(self, model: str) -> Statistics:
        found = self._statistics.get(model)
        return self._statistics.setdefault(model, Statistics()) if found is None else found

    def count_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts a response. ``route`` is the path's pattern, not the path."""
        self._child(self._http, method, route, str(status)).inc()
        self._child(self._http_seconds, route).observe(seconds)

    def observer(self, model: str) -> Observer:
        """What a batcher of this model tells."""
        return _BatchObserver(self, model)

    def first_token(self, model: str, seconds: float) -> None:
        """The time to the first token (TTFT) of a request."""
        self._llm_first.labels(model).observe(seconds)

    def output_token(self, model: str, seconds: float) -> None:
        """The time of an output token (TPOT) of a request: what came after the first one, a token."""
        self._llm_each.labels(model).observe(seconds)

    def refresh(self, repository: Repository) -> None:
        """Reads what is not told: queues, memory, the engines' counters. Counts what is still to be counted."""
        self._flush()
        models = repository.models
        self._loaded.set(len(models))
        for name, model in models.items():
            if isinstance(model, MethodModel):
                self._waiting.labels(name).set(model.batcher.waiting)
                self._running.labels(name).set(model.batcher.running)
        for package in repository.packages:
            if package.engine is not None:
                self._refresh_engine(package.name, package.engine.stats())
            source = package.engine or package.program
            if source is None:
                continue
            try:
                memory = source.memory()
            except UntorchError:  # it was closed meanwhile
                continue
            for kind in _MEMORY:
                if isinstance(memory.get(kind), int):
                    self._memory.labels(package.name, kind).set(memory[kind])

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        self._flush()
        if not self._is_shared:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def _refresh_engine(self, name: str, stats: Any) -> None:
        seen = self._seen.setdefault(name, {})
        for field, counter in self._llm.items():
            now = getattr(stats, field)
            # After a new load the engine counts from 0.
            counter.labels(name).inc(now - seen.get(field, 0) if now >= seen.get(field, 0) else now)
            seen[field] = now
        self._llm_running.labels(name).set(stats.running)
        self._llm_waiting.labels(name).set(stats.waiting)
        self._llm_kv.labels(name).set(1 - stats.blocks_free / stats.blocks if stats.blocks else 0)

    def _child(self, metric: Any, *labels: str) -> Any:
        """``metric.labels``, which checks and joins its labels under a lock at every call."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)


class _BatchObserver(Observer):
    def __init__(self, metrics: Metrics, model: str) -> None:
        self._later = metrics.later
        self._calls = metrics._batch_calls.labels(model)
        self._rows = metrics._batch_rows.labels(model)
        self._seconds = metrics._batch_seconds.labels(model)
        self._wait = metrics._queue_seconds.labels(model)
        self._splits = metrics._splits.labels(model)
        self._statistics = metrics.statistics(model)

    def batch(self, calls: int, rows: int, seconds: float) -> None:
        self._later(self._count_batch, calls, rows, seconds, time.time())

    def waited(self, seconds: float) -> None:
        self._later(self._count_wait, seconds)

    def split(self, error: BaseException) -> None:
        self._splits.inc()

    def _count_batch(self, calls: int, rows: int, seconds: float, now: float) -> None:
        self._calls.observe(calls)
        self._rows.observe(rows)
        self._seconds.observe(seconds)
        self._statistics.executed(calls, rows, seconds, now)

    def _count_wait(self, seconds: float) -> None:
        self._wait.observe(seconds)
        self._statistics.waited(seconds)
