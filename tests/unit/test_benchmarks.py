"""The benchmarks' common parts: statistics, tables, and contestants in processes of their own."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import time
import types
from collections.abc import Iterator

import numpy
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def common(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module, with its working folder replaced by one that holds the case "ones": x + 1 of eight ones."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("common")
    monkeypatch.setattr(module, "WORK", tmp_path)
    ones = numpy.ones(8, numpy.float32)
    numpy.savez(tmp_path / "ones.npz", input0=ones, expected=ones + 1)
    numpy.savez(tmp_path / "wrong.npz", input0=ones, expected=ones)
    numpy.savez(tmp_path / "shape.npz", input0=ones, expected=ones[:4])
    yield module
    sys.modules.pop("common", None)


def test_statistics_take_all_calls_and_the_rounds_apart(common: types.ModuleType) -> None:
    result = common.summarise([[1.0, 2.0, 9.0], [4.0, 4.0]])
    assert result == {
        "median": 4.0, "best": 1.0, "lowest_round_median": 2.0, "highest_round_median": 4.0, "calls": 5.0
    }  # fmt: skip


def test_table_for_a_terminal(common: types.ModuleType) -> None:
    table = common.Table(["Runtime", "ms"], [["a", "10.25"], ["longer name", "2"]], "A note.")
    assert table.text() == (
        "Runtime         ms\n-----------  -----\na            10.25\nlonger name      2\nA note."
    )  # fmt: skip


def test_report_is_written_with_machine_and_tables(common: types.ModuleType, tmp_path: pathlib.Path) -> None:
    report = common.Report("speed", True)
    report.values["x"] = 1
    report.tables["speed"] = common.Table(["Runtime"], [["a"]])
    document = json.loads(report.write(tmp_path / "results").read_text())
    assert document["script"] == "benchmarks/speed.py"
    assert document["quick"] is True
    assert document["values"] == {"x": 1}
    assert document["tables"] == {"speed": {"columns": ["Runtime"], "rows": [["a"]], "note": ""}}
    machine = document["machine"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**20
    assert machine["versions"]["numpy"] == numpy.__version__
    assert 0 <= machine["cpu_share_of_others"] <= 1.1


def test_own_work_is_not_that_of_others(common: types.ModuleType) -> None:
    clock = common.CpuClock()
    clock._busy -= 1.0  # as if other processes had used a second
    clock._all -= 1.0
    assert clock.share_of_others() > 0.3
    own = common.CpuClock()
    own._own -= 1000.0
    assert own.share_of_others() == 0.0


def test_contestants_take_turns_and_are_checked(common: types.ModuleType) -> None:
    entries = [common.Contestant(key, key, "numpy", "none") for key in ("a", "b")]
    with common.Workers(entries, 1) as workers:
        assert workers.check(["ones"], 1e-6) == {"a": {"ones": 0.0}, "b": {"ones": 0.0}}
        times = workers.rounds(["ones"], 2, 0.01, inner=5)
        idle = workers.idle_share
    assert 0 <= idle < 0.5
    for key in ("a", "b"):
        assert len(times[key]["ones"]) == 2
        assert all(0 < value < 0.1 for values in times[key]["ones"] for value in values)
    assert all(worker._process.returncode == 0 for worker in workers.workers)


def test_a_burst_lasts_as_long_as_asked(common: types.ModuleType) -> None:
    with common.Workers([common.Contestant("a", "a", "numpy", "none")], 1) as workers:
        start = time.perf_counter()
        workers.workers[0].time("ones", 0.2)
        assert time.perf_counter() - start >= 0.2


def test_a_wrong_result_ends_the_benchmark(common: types.ModuleType) -> None:
    entries = [common.Contestant("a", "Label", "numpy", "none")]
    with common.Workers(entries, 1) as workers, pytest.raises(SystemExit) as caught:
        workers.check(["wrong"], 1e-6)
    assert str(caught.value) == "Label, wrong: differs from eager by 1.00e+00"
    with common.Workers(entries, 1) as workers, pytest.raises(SystemExit) as caught:
        workers.check(["shape"], 1e-6)
    assert str(caught.value) == "Label: its process ended with exit code 1"


def test_cold_start_of_a_fresh_process(common: types.ModuleType) -> None:
    cold_start = importlib.import_module("cold_start")
    try:
        run = cold_start.start_once(common.Contestant("a", "a", "numpy", "none"), [("float32", (8,))])
    finally:
        sys.modules.pop("cold_start", None)
    assert run["total"] > run["python_and_numpy"] > run["first_call"] > 0
    assert run["VmRSS"] >= run["RssAnon"] + run["RssFile"] > 2**20


def test_size_of_a_distribution_and_what_it_requires(common: types.ModuleType) -> None:
    size = importlib.import_module("size")
    try:
        assert size.distribution_bytes("pytest") > 100_000
        needed = size.requirements("pytest")
        assert "pluggy" in needed
        assert "numpy" not in needed
        assert not size.installed("no-such-distribution")
        assert size.mib(15 * 2**20) == "15.0"
        assert size.mib(2**19) == "0.50"
    finally:
        sys.modules.pop("size", None)
