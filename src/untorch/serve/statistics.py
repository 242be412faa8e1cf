"""What the protocol's statistics extension tells of a model: requests, queue and executions since the server began."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Statistics"]


@dataclass
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.ns += int(seconds * 1e9) * count

    def to_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass
class Statistics:
    """Of one model. Any thread may call it."""

    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)  # a request, each with the time of its execution
    executions: dict[int, _Duration] = field(default_factory=dict)  # by their rows
    last: int = 0  # milliseconds since 1970
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, is_answered: bool, seconds: float) -> None:
        """A request ended."""
        with self._lock:
            (self.success if is_answered else self.fail).add(seconds)

    def waited(self, seconds: float) -> None:
        """A call left the queue."""
        with self._lock:
            self.queue.add(seconds)

    def executed(self, calls: int, rows: int, seconds: float, end: float) -> None:
        """So many calls were computed together. ``end``: seconds since 1970."""
        with self._lock:
            self.compute.add(seconds, calls)
            self.executions.setdefault(rows, _Duration()).add(seconds)
            self.last = int(end * 1e3)

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """As Triton's statistics extension has it. Input and output are no steps of their own here: they take 0 ns."""
        with self._lock:
            compute = self.compute.to_json()
            no_time = {"count": compute["count"], "ns": 0}
            batches = sorted(self.executions.items())
            return {
                "name": name,
                "version": version,
                "last_inference": self.last,
                "inference_count": sum(rows * one.count for rows, one in batches),
                "execution_count": sum(one.count for _, one in batches),
                "inference_stats": {
                    "success": self.success.to_json(),
                    "fail": self.fail.to_json(),
                    "queue": self.queue.to_json(),
                    "compute_input": no_time,
                    "compute_infer": compute,
                    "compute_output": no_time,
                    "cache_hit": {"count": 0, "ns": 0},
                    "cache_miss": {"count": 0, "ns": 0},
                },
                "batch_stats": [
                    {
                        "batch_size": rows,
                        "compute_input": {"count": one.count, "ns": 0},
                        "compute_infer": one.to_json(),
                        "compute_output": {"count": one.count, "ns": 0},
                    }
                    for rows, one in batches
                ],
            }
