"""Pooled requests: an embedding or scores of a prompt, from the rows of its tokens, over the engine's own scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.core import Core
from untorch.llm.handle import Handle
from untorch.llm.logits import Logits
from untorch.llm.outputs import FinishReason, Usage
from untorch.llm.params import SamplingParams
from untorch.llm.request import Request, Sample
from untorch.llm.sampler import SamplerState
from untorch.llm.scheduler import Plan, Scheduled
from untorch.llm.sequence import Sequence as TokenSequence
from untorch.llm.settings import ROW_POOLINGS
from untorch.runtime.errors import InvalidArgumentError, ModelError

__all__ = ["PooledRequest", "Pooling", "PoolingCore", "PoolingOutput"]

_PARAMS = SamplingParams(max_tokens=1, temperature=0)


@dataclass(frozen=True)
class PoolingOutput:
    """data: the embedding or the scores, float32; None if there is an error. error: what made the request fail."""

    data: NDArray[np.float32] | None
    usage: Usage
    finish_reason: FinishReason
    error: Exception | None = None


class Pooling(Handle[PoolingOutput]):
    """A pooled request that was submitted: wait for its ``result()``, ``await`` it, or ``cancel()`` it."""


class Pooler:
    """Takes the rows of a sequence chunk by chunk. A sequence that was preempted begins again at its first token."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._value: NDArray[Any] | None = None

    def rows(self, item: Scheduled) -> range:
        """The positions of a chunk whose rows are wanted."""
        if self.kind == "last":
            return range(max(item.start, len(item.sequence.tokens) - 1), item.end)
        if self.kind == "cls":
            return range(item.start, min(item.end, 1))
        return range(item.start, item.end)

    def add(self, rows: NDArray[np.float32], start: int) -> None:
        """Of the positions from ``start`` on. Sums are of float64."""
        if self.kind in ROW_POOLINGS:
            value: NDArray[Any] = rows[-1]
        elif self.kind == "max":
            value = rows.max(0)
        elif self.kind == "weighted_mean":
            value = np.arange(start + 1, start + len(rows) + 1, dtype=np.float64) @ rows
        else:
            value = rows.sum(0, dtype=np.float64)
        if start == 0 or self._value is None or self.kind in ROW_POOLINGS:
            self._value = np.array(value)
        else:
            self._value = np.maximum(self._value, value) if self.kind == "max" else self._value + value

    def result(self, count: int) -> NDArray[np.float32]:
        """Of a sequence of that many tokens."""
        assert self._value is not None
        parts = {"mean": count, "weighted_mean": count * (count + 1) / 2, "mean_sqrt_len": count**0.5}
        found: NDArray[np.float32] = (self._value / parts.get(self.kind, 1)).astype(np.float32)
        return found


class PooledRequest(Request):
    """A request without output tokens: its one sample ends when the prompt is computed."""

    def __init__(
        self, sequence: TokenSequence, kind: str, deadline: float | None, handle: Handle[PoolingOutput]
    ) -> None:  # fmt: skip
        super().__init__(list(sequence.tokens), _PARAMS, (), None, deadline, handle)
        self.pooler = Pooler(kind)
        self.data: NDArray[np.float32] | None = None
        sequence.owner = Sample(self, sequence, SamplerState(_PARAMS, frozenset(), (), 0, None))
        # Only the last token's row is computed whatever the cache has; others need every token's.
        sequence.shares_prefix = kind == "last"
        self.samples.append(sequence.owner)

    def output(self, error: Exception | None = None) -> Any:
        """The PoolingOutput, once the sample is finished."""
        reason = self.samples[0].finish_reason or "error"
        if error is None and self.data is None:
            error = {
                "cancelled": CancelledError("the request was cancelled"),
                "timeout": TimeoutError("the request's timeout passed before its prompt was computed"),
            }.get(reason)
            if error is None:
                error = InvalidArgumentError(
                    f"prompt: the pages do not hold its {len(self.prompt)} tokens: give the engine more kv_memory"
                )
        return PoolingOutput(None if error is not None else self.data, self.usage(self.samples), reason, error)


class PoolingCore(Core):
    """The engine's thread for packages that make no tokens."""

    def _rows(self, plan: Plan) -> tuple[list[int], list[Any], list[tuple[Sample, int]]]:
        rows: list[int] = []
        ends: list[tuple[Sample, int]] = []
        begin = 0
        for item in plan.items:
            wanted = _pooler(item).rows(item)
            rows += range(begin + wanted.start - item.start, begin + wanted.stop - item.start)
            if item.end == len(item.sequence.tokens):
                ends.append((item.sequence.owner, len(rows) - 1))
            begin += item.count
        return rows, [], ends

    def _take(
        self, plan: Plan, logits: Logits, prompts: Sequence[Any], ends: Sequence[tuple[Sample, int]]
    ) -> None:  # fmt: skip
        values, row = logits.numpy(), 0
        for item in plan.items:
            if wanted := _pooler(item).rows(item):
                _pooler(item).add(values[row : row + len(wanted)], wanted.start)
                row += len(wanted)
        done: list[PooledRequest] = [sample.request for sample, _ in ends]  # type: ignore[misc]
        if not done:
            return
        try:
            pooled = np.stack([request.pooler.result(len(request.prompt)) for request in done])
            if self.settings.dense is not None:
                pooled = self.runner.dense(pooled)
            if self.settings.normalize:
                pooled = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
        except Exception as error:
            for request in done:
                self._fail(request, error)
            return
        for request, row in zip(done, pooled, strict=True):
            self.cached_tokens += request.samples[0].sequence.cached
            if not np.isfinite(row).all():
                self._fail(request, ModelError("the model gives values that are not finite"))
                continue
            request.data = row
            self._finish(request.samples[0], "stop")


def _pooler(item: Scheduled) -> Pooler:
    pooler: Pooler = item.sequence.owner.request.pooler
    return pooler
