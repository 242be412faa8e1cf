"""``untorch.profile`` on the CPU: the table, the trace, and that profiling changes no result."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import untorch
from untorch import _core
from untorch.profiler import Profile, Roofline, measure_roofline, profile
from untorch.profiler.measure import Run, Step, _table
from untorch.profiler.recording import CALL, FUNCTION, KERNEL, Range, Recording

HOOKS = platform.machine() == "x86_64"  # native/model/kernel_hooks.cpp


def embed_inputs(method: Any) -> list[Any]:
    ids = np.arange(15).reshape(3, 5) % 64
    return [ids.astype(np.int64), np.ones((3, 5), np.int64)]


@pytest.fixture(scope="module")
def found(rows_package: Path) -> Profile:
    return profile(rows_package, embed_inputs, method="embed", runs=4, warmup=1, roofline=False)


def test_rows_have_lines_bytes_and_shares(found: Profile) -> None:
    assert (found.method, found.device, found.graph, found.dropped) == ("embed", "cpu", False, 0)
    assert len(found.runs) == 4 and found.matched
    assert sum(row.share for row in found.rows) == pytest.approx(1.0, abs=0.01)
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=0.01)
    if HOOKS:
        kernel = next(row for row in found.rows if row.kind == "kernel")
        assert kernel.name.startswith("cpp_fused_") and kernel.calls == 1
        [line] = {line.rpartition(":")[0] for line in kernel.lines}
        assert line.endswith("models.py") and not line.startswith("/")
        # Token ids and mask int64[3, 5], table rows float32[15, 8], result [3, 8]: not the whole table.
        assert kernel.nbytes is not None and 2 * 15 * 8 < kernel.nbytes <= 2 * 15 * 8 + 4 * (64 * 8 + 6 * 8 + 15)
        assert "aten.embedding" in kernel.operators or "aten.index" in kernel.operators
    assert [row.name for row in found.rows[-2:]] == [
        "between kernels (generated code)", "around the call (checks, output arrays)",
    ]  # fmt: skip


def test_the_trace_opens_in_perfetto(found: Profile, tmp_path: Path) -> None:
    found.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    runs = [event for event in events if event["cat"] == "run"]
    assert [event["name"] for event in runs] == [f"embed.run #{i}" for i in range(4)]
    for event in events:  # every event lies in a run
        assert any(r["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= r["ts"] + r["dur"] + 1 for r in runs)
    if HOOKS:
        [*kernels] = [event for event in events if event["cat"] == "kernel"]
        assert len(kernels) >= 4 and kernels[0]["args"]["lines"] and kernels[0]["args"]["bytes"] > 0


def test_results_do_not_change(rows_package: Path) -> None:
    with untorch.load(rows_package) as program:
        want = program["embed"].run(embed_inputs(None))
    with Recording() as recording, untorch.load(rows_package) as program:
        got = program["embed"].run(embed_inputs(None))
        kinds = {range_.kind for range_ in recording.collect()}
    assert kinds == ({CALL, FUNCTION, KERNEL} if HOOKS else {CALL, FUNCTION})
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_library_that_was_hooked_runs_on_when_nothing_records(rows_package: Path) -> None:
    with Recording():
        program = untorch.load(rows_package)
        before = program["embed"].run(embed_inputs(None))
    after = program["embed"].run(embed_inputs(None))
    np.testing.assert_array_equal(before[0], after[0])
    assert _core.profile_collect() == ([], 0)
    program.close()


def test_ranges_nest(rows_package: Path) -> None:
    with Recording() as recording, untorch.load(rows_package) as program:
        program["embed"].run(embed_inputs(None))
        ranges = recording.collect()
    [call] = [range_ for range_ in ranges if range_.kind == CALL]
    assert call.name == "embed"
    inside = [range_ for range_ in ranges if range_.begin >= call.begin and range_.kind != CALL]
    assert inside and all(range_.end <= call.end for range_ in inside)
    assert not any(range_.has_device_time or range_.captured for range_ in ranges)
    assert not any(range_.function.startswith("aoti_torch_get_") for range_ in ranges)


def test_one_profile_at_a_time(rows_package: Path) -> None:
    with (
        Recording(),
        pytest.raises(
            untorch.UnsupportedError, match="a profile is being recorded already: one at a time in a process"
        ),
    ):
        profile(rows_package, embed_inputs, method="embed")
    assert profile(rows_package, embed_inputs, method="embed", runs=1, roofline=False).runs


def test_errors(rows_package: Path) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match="expected runs ≥ 1 and warmup ≥ 0, got 0 and 10"):
        profile(rows_package, embed_inputs, method="embed", runs=0)
    with pytest.raises(untorch.InvalidArgumentError, match="graph: method embed runs on the CPU"):
        profile(rows_package, embed_inputs, method="embed", graph=True)
    with pytest.raises(untorch.InvalidArgumentError, match="has several methods, name one: "):
        profile(rows_package, embed_inputs)
    with Recording():  # errors have stopped the recording
        assert _core.profile_collect() == ([], 0)


def test_a_stock_package_has_kernels_without_lines(stock_linear: Path) -> None:
    found = profile(stock_linear, [np.ones((2, 4), np.float32)], runs=2, roofline=False)
    assert not found.matched and found.rows
    assert not any(row.lines for row in found.rows)


def test_roofline() -> None:
    limits = measure_roofline("cpu", 1)
    assert limits.dtype == "float32"
    assert 1e8 < limits.bytes_per_second < 1e13 and 1e8 < limits.operations_per_second < 1e15
    plain = Roofline(bytes_per_second=10.0, operations_per_second=100.0, dtype="float32")
    assert plain.least_seconds(20, 50) == 2.0
    assert plain.least_seconds(1, 300) == 3.0
    assert plain.least_seconds(None, 100) == 1.0
    assert plain.least_seconds(None, None) is None and plain.least_seconds(0, 0) is None


def test_one_slow_run_changes_nothing() -> None:
    def made(begin: int, kernel: int) -> Run:
        call = Range("forward", "forward", CALL, False, 1, begin + 10, begin + kernel + 30, -1, -1)
        step = Range("loop", "loop", KERNEL, False, 1, begin + 20, begin + 20 + kernel, -1, -1)
        return Run(begin, begin + kernel + 50, call, [Step(step, None)])

    seconds, rows = _table([made(0, 1000), made(10_000, 50_000), made(100_000, 1010)], None, on_gpu=False)
    assert [(row.name, round(row.seconds * 1e9)) for row in rows] == [
        ("loop", 1010), ("between kernels (generated code)", 20), ("around the call (checks, output arrays)", 30),
    ]  # fmt: skip
    assert round(seconds * 1e9) == 1060
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_a_row_that_most_runs_do_not_have() -> None:
    call = Range("forward", "forward", CALL, False, 1, 0, 100, -1, -1)
    step = Range("loop", "loop", KERNEL, False, 1, 10, 60, -1, -1)
    runs = [Run(0, 100, call, []), Run(0, 100, call, []), Run(0, 100, call, [Step(step, None)])]
    _, rows = _table(runs, None, on_gpu=False)
    assert (rows[0].name, rows[0].seconds, rows[0].calls) == ("loop", 0.0, 1 / 3)
