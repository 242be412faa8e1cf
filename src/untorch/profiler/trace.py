"""A profile as a Chrome trace: complete events of the host's threads, and of the GPU.

Format: "Trace Event Format", Google, 2016. Perfetto and chrome://tracing open it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from untorch.profiler.recording import CALL, Range
from untorch.profiler.sequence import Call

if TYPE_CHECKING:
    from untorch.profiler.measure import Profile

__all__ = ["chrome_trace"]

_HOST, _GPU = 1, 2


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """The trace's JSON document; times are microseconds from the first run's begin."""
    start = profile.runs[0].begin
    events: list[dict[str, Any]] = [
        _name("process_name", _HOST, 0, f"host: {profile.method}"),
    ]
    threads: dict[int, None] = {}
    has_gpu = False

    def add(pid: int, tid: int, name: str, begin: float, end: float, category: str, args: dict[str, Any]) -> None:
        events.append(
            {
                "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": (begin - start) / 1e3,
                "dur": max(end - begin, 0) / 1e3, "args": args,
            }
        )  # fmt: skip

    for number, run in enumerate(profile.runs):
        thread = run.call.thread if run.call is not None else 0
        threads.setdefault(thread)
        add(_HOST, thread, f"{profile.method}.run #{number}", run.begin, run.end, "run", {})
        ranges: list[tuple[Range, Call | None]] = [(run.call, None)] if run.call is not None else []
        for step in run.steps:
            ranges.append((step.range, step.call))
            ranges += [(inner, None) for inner in step.inner]
        for range_, call in ranges:
            args = _arguments(call)
            if not range_.captured:
                threads.setdefault(range_.thread)
                add(_HOST, range_.thread, range_.name, range_.begin, range_.end, _CATEGORIES[range_.kind], args)
            if range_.has_device_time:
                has_gpu = True
                depth = 0 if range_.kind == CALL else 1
                add(_GPU, depth, range_.name, range_.device_begin, range_.device_end, _CATEGORIES[range_.kind], args)
    for thread in threads:
        events.append(_name("thread_name", _HOST, thread, f"thread {thread}"))
    if has_gpu:
        events.append(_name("process_name", _GPU, 0, profile.device))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"file": profile.path, "method": profile.method, "device": profile.device},
    }


_CATEGORIES = ("call", "function", "kernel", "launch", "replay")


def _arguments(call: Call | None) -> dict[str, Any]:
    if call is None:
        return {}
    known: dict[str, Any] = {"operators": list(call.operators), "lines": list(call.lines), "module": call.module}
    if call.nbytes is not None:
        known["bytes"] = call.nbytes
    if call.operations is not None:
        known["operations"] = call.operations
    return known


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
