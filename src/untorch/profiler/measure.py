"""``profile``: runs a method with the recorder on, and adds up where the time of a call goes."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from untorch import _core
from untorch.files import write_text
from untorch.profiler.recording import CALL, FUNCTION, KERNEL, LAUNCH, REPLAY, Range, Recording
from untorch.profiler.roofline import Roofline, measure_roofline
from untorch.profiler.sequence import Call, CallSequence, match_calls, parse_sequence, sizes_of_inputs
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.method import Method
from untorch.runtime.program import Program, load

__all__ = ["Profile", "Row", "Step", "profile"]

BETWEEN = "between kernels (generated code)"
OUTSIDE = "around the call (checks, output arrays)"
IDLE = "GPU idle"


@dataclass(frozen=True)
class Step:
    """One outermost range of a run, and the recorded call that it is; None where that is not known."""

    range: Range
    call: Call | None
    inner: tuple[Range, ...] = ()


@dataclass
class Run:
    """One call of the method: begin and end on the host, in nanoseconds, its call range, and its steps."""

    begin: int
    end: int
    call: Range | None
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A line of the table. Seconds are those of a run, the median of all; bytes and operations of one run.

    kind: "kernel" (a loop of the library), "function" (a C function), "launch" (a kernel on a GPU), "other".
    host_seconds: on a GPU, the host's time for it; ``seconds`` is the GPU's. roofline: the least possible time over the
    measured one.
    """

    name: str
    kind: str
    operators: tuple[str, ...]
    lines: tuple[str, ...]
    modules: tuple[str, ...]
    calls: float
    seconds: float
    share: float
    nbytes: int | None
    operations: int | None
    roofline: float | None
    host_seconds: float | None


@dataclass(frozen=True)
class Profile:
    """What ``profile`` measured. ``seconds``: the sum of the rows, on a GPU of its work there. ``wall_seconds``: until
    the call returned, and on a GPU was done; the median. ``matched``: every kernel call is one that export recorded.
    """

    path: str
    method: str
    device: str
    graph: bool
    seconds: float
    wall_seconds: float
    rows: tuple[Row, ...]
    roofline: Roofline | None
    matched: bool
    dropped: int
    runs: tuple[Run, ...]

    def to_json(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "file": self.path, "method": self.method, "device": self.device, "graph": self.graph,
            "runs": len(self.runs), "seconds": self.seconds, "wall_s": self.wall_seconds, "matched": self.matched,
            "dropped": self.dropped,
            "roofline": None if self.roofline is None else vars(self.roofline),
            "rows": [
                {
                    "name": row.name, "kind": row.kind, "operators": list(row.operators), "lines": list(row.lines),
                    "modules": list(row.modules), "calls": row.calls, "seconds": row.seconds, "share": row.share,
                    "bytes": row.nbytes, "operations": row.operations, "roofline": row.roofline,
                    "host_s": row.host_seconds,
                }
                for row in self.rows
            ],
        }  # fmt: skip

    def trace(self) -> dict[str, Any]:
        """The runs as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open."""
        from untorch.profiler.trace import chrome_trace

        return chrome_trace(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON."""
        write_text(path, json.dumps(self.trace(), separators=(",", ":")))


def profile(
    source: str | os.PathLike[str],
    inputs: Sequence[Any] | Mapping[str, Any] | Callable[[Method], Sequence[Any]],
    *,
    method: str | None = None,
    runs: int = 10,
    warmup: int = 10,
    graph: bool = False,
    roofline: bool = True,
    **options: Any,
) -> Profile:
    """Load the file, run a method ``runs`` times, and say where the time goes.

    Every run waits for its end, so that GPU work of one run never overlaps the next. Nothing is recorded in other files
    that are open, but their calls meanwhile take longer.

    Args:
        source: The path of a .pt2 file.
        inputs: As for ``Method.run``; or a function that makes them for the method.
        method: Its name; the default is the only one, or "forward".
        runs: How many calls are recorded.
        warmup: Calls before them.
        graph: On a GPU, replay a CUDA graph. Each kernel of it is timed by events that become nodes of the graph.
        roofline: Also measure the machine's read bandwidth and GEMM rate, about a second.
        options: Those of ``untorch.load``.

    Raises:
        InvalidArgumentError: The method is unknown, ``runs`` is not positive, or ``graph`` is for a method on the CPU.
        UnsupportedError: Another profile is being recorded.
    """
    if runs < 1 or warmup < 0:
        raise InvalidArgumentError(f"profile: expected runs ≥ 1 and warmup ≥ 0, got {runs} and {warmup}")
    # Libraries are opened while something records: then their loops are hooked.
    with Recording(), load(source, **options) as program:
        chosen = _method(program, method)
        chosen.open()
        given = inputs(chosen) if callable(inputs) else inputs
        flat = list(chosen._ordered(given))
        if graph and chosen.device == "cpu":
            raise InvalidArgumentError(f"profile: graph: method {chosen.name} runs on the CPU")
        sizes = sizes_of_inputs(chosen.inputs, flat)
        sequence = parse_sequence(_entry(program, chosen), sizes)
        if chosen.device == "cpu":
            recorded, dropped = _record_cpu(chosen, flat, runs, warmup)
        else:
            _core.profile_stop()
            recorded, dropped = _record_gpu(chosen, flat, runs, warmup, graph)
        name, device = chosen.name, chosen.device
    limits = None
    if roofline:
        limits = measure_roofline(device, int(options.get("num_threads", 0)))
    done, matched = _steps(recorded, sequence, device != "cpu")
    total, rows = _table(done, limits, device != "cpu")
    wall = statistics.median(run.end - run.begin for run in done) / 1e9
    return Profile(
        os.fspath(source), name, device, graph, total, wall, tuple(rows), limits, matched, dropped, tuple(done)
    )


def _method(program: Program, name: str | None) -> Method:
    if name is not None:
        return program[name]
    if len(program.methods) == 1 or "forward" in program.methods:
        return program["forward" if "forward" in program.methods else program.methods[0]]
    raise InvalidArgumentError(f"profile: {program.path} has several methods, name one: {', '.join(program.methods)}")


def _entry(program: Program, method: Method) -> bytes | None:
    """What export recorded of the method's calls, for the code that runs here; None without."""
    spec = program.manifest.get("methods", {}).get(method.name, {})
    codes = [spec, *(spec.get("variants") or ())]
    if method.device != "cpu":
        codes = [code for code in codes if code.get("gpu_architecture") == method.gpu_architecture] or codes
    elif len(codes) > 1:
        # The loader takes the code with the most features that this CPU has all of.
        here = set(_core.cpu_features().split())
        usable = [code for code in codes if here.issuperset((code.get("cpu") or {}).get("features", ()))]
        codes = sorted(usable, key=lambda code: -len((code.get("cpu") or {}).get("features", ()))) or codes
    entry = codes[0].get("kernel_calls")
    return None if entry is None else program._program.entry(entry)


_Recorded = list[tuple[int, int, list[Range]]]


def _record_cpu(method: Method, flat: list[Any], runs: int, warmup: int) -> tuple[_Recorded, int]:
    found: _Recorded = []
    dropped = 0
    for number in range(warmup + runs):
        begin = time.monotonic_ns()
        method.run(flat)
        end = time.monotonic_ns()
        ranges, lost = _core.profile_collect()
        if number >= warmup:
            found.append((begin, end, _sorted(ranges)))
            dropped += lost
    return found, dropped


def _record_gpu(method: Method, flat: list[Any], runs: int, warmup: int, graph: bool) -> tuple[_Recorded, int]:
    """With the arrays on the GPU, as ``untorch bench`` measures."""
    index = int(method.device.partition(":")[2] or 0)
    on_cpu = [spec.device == "cpu" for spec in method.inputs] or [False] * len(flat)
    placed = [array if stays else _core.to_device(array, index) for array, stays in zip(flat, on_cpu, strict=True)]
    run: Callable[[list[Any]], list[Any]] = method.run
    found: _Recorded = []
    captured = None
    run(placed)  # its one-off work, such as loading kernels, is no part of a capture
    with Recording(index) as recording:
        try:
            if graph:
                captured = _core.Graph(method._core, placed)
                run = captured.run
                recording.collect()
            for number in range(warmup + runs):
                begin = time.monotonic_ns()
                results = run(placed)
                _core.synchronize(index, _core.call_stream(index))
                end = time.monotonic_ns()
                ranges = recording.collect()
                del results
                if number >= warmup:
                    found.append((begin, end, ranges))
        finally:
            if captured is not None:
                captured.close()
    return found, recording.dropped


def _sorted(ranges: list[Any]) -> list[Range]:
    return sorted((Range(*values) for values in ranges), key=lambda range_: (range_.begin, -range_.end))


def _steps(recorded: _Recorded, sequence: CallSequence, on_gpu: bool) -> tuple[list[Run], bool]:
    """The outermost ranges of each run, with what export knows of them."""
    done, matched = [], True
    for begin, end, ranges in recorded:
        call = next((range_ for range_ in ranges if range_.kind == CALL and not range_.captured), None)
        replay = next((range_ for range_ in ranges if range_.kind == REPLAY), None)
        inside = [r for r in ranges if r.kind in (FUNCTION, KERNEL, LAUNCH) and r.captured == (replay is not None)]
        outer: list[tuple[Range, list[Range]]] = []
        for range_ in inside:
            if outer and range_.thread == outer[-1][0].thread and range_.end <= outer[-1][0].end:
                outer[-1][1].append(range_)
            else:
                outer.append((range_, []))
        calls, fits = match_calls([range_ for range_, _ in outer], sequence.calls)
        matched = matched and fits
        steps = [Step(range_, known, tuple(inner)) for (range_, inner), known in zip(outer, calls, strict=True)]
        if on_gpu:
            steps = [step for step in steps if step.range.has_device_time or not step.range.captured]
        done.append(Run(begin, end, replay or call, steps))
    return done, matched


def _host_ns(range_: Range) -> float:
    return 0 if range_.captured else range_.end - range_.begin


def _device_ns(range_: Range) -> float:
    return range_.device_end - range_.device_begin if range_.has_device_time else 0


@dataclass
class _Sum:
    """Of one row. ns, host_ns: of each run."""

    step: Step
    ns: list[float]
    host_ns: list[float]
    modules: dict[str, None] = field(default_factory=dict)
    calls: int = 0
    nbytes: int = 0
    operations: int = 0
    known_bytes: bool = True
    known_operations: bool = True


def _table(runs: list[Run], limits: Roofline | None, on_gpu: bool) -> tuple[float, list[Row]]:
    """Seconds of a run, and its rows: the longest first, then what is between and around them.

    Rows are medians over the runs, and the seconds of a run their sum: one run that was interrupted changes neither.
    """
    sums: dict[tuple[str, tuple[str, ...]], _Sum] = {}
    between, outside = [0.0] * len(runs), [0.0] * len(runs)
    for number, run in enumerate(runs):
        covered = 0.0
        for step in run.steps:
            lines = step.call.lines if step.call is not None else ()
            key = step.range.function, lines
            if (entry := sums.get(key)) is None:
                entry = sums[key] = _Sum(step, [0.0] * len(runs), [0.0] * len(runs))
            ns = _device_ns(step.range) if on_gpu else _host_ns(step.range)
            entry.calls += 1
            entry.ns[number] += ns
            entry.host_ns[number] += _host_ns(step.range)
            covered += ns
            if step.call is None or step.call.nbytes is None:
                entry.known_bytes = False
            else:
                entry.nbytes += step.call.nbytes
            if step.call is None or step.call.operations is None:
                entry.known_operations = False
            else:
                entry.operations += step.call.operations
            if step.call is not None and step.call.module:
                entry.modules[step.call.module] = None
        span = (_device_ns(run.call) if on_gpu else _host_ns(run.call)) if run.call is not None else 0
        whole = span if on_gpu and span > 0 else run.end - run.begin
        between[number] = max(span - covered, 0)
        outside[number] = max(whole - span, 0)
    rest = ((IDLE, between),) if on_gpu else ((BETWEEN, between), (OUTSIDE, outside))
    medians = [statistics.median(entry.ns) for entry in sums.values()] + [statistics.median(ns) for _, ns in rest]
    total_ns = sum(medians)
    rows = [_row(entry, len(runs), total_ns, limits, on_gpu) for entry in sums.values()]
    rows.sort(key=lambda row: -row.seconds)
    for name, values in rest:
        ns = statistics.median(values)
        share = ns / total_ns if total_ns else 0.0
        rows.append(Row(name, "other", (), (), (), 1.0, ns / 1e9, share, None, None, None, None))
    return total_ns / 1e9, rows


def _row(entry: _Sum, count: int, total_ns: float, limits: Roofline | None, on_gpu: bool) -> Row:
    step, ns = entry.step, statistics.median(entry.ns)
    seconds = ns / 1e9
    nbytes = entry.nbytes // count if entry.known_bytes else None
    operations = entry.operations // count if entry.known_operations else None
    least = limits.least_seconds(nbytes, operations) if limits is not None else None
    kinds = {FUNCTION: "function", KERNEL: "kernel", LAUNCH: "launch"}
    return Row(
        step.range.name if step.range.kind != FUNCTION else step.range.function,
        kinds[step.range.kind],
        step.call.operators if step.call is not None else (),
        step.call.lines if step.call is not None else (),
        tuple(entry.modules),
        entry.calls / count,
        seconds,
        ns / total_ns if total_ns else 0.0,
        nbytes,
        operations,
        least / seconds if least is not None and seconds > 0 else None,
        statistics.median(entry.host_ns) / 1e9 if on_gpu else None,
    )
