"""The profiler on a fake GPU: events around C functions and launches, in calls and in graphs.

The fake driver does work at once, so times are those of the host between two events: what is tested is which events are
recorded, on which streams, and how they become ranges. Nothing here says what a real GPU measures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.fake_gpu import found

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

PROFILE = """
x = np.ones((4, 500), np.float16)
profile = untorch.profile(path, [x], method="int4", runs=2, warmup=1, roofline=False, graph=GRAPH)
document = profile.to_json()
events = profile.trace()["traceEvents"]
found["document"] = document
found["gpu"] = [e for e in events if e["pid"] == 2 and e["ph"] == "X"]
found["host"] = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
found["events"] = fake.fake_events().decode().split("\\n")
found["launches"] = fake.fake_launches().decode().split("\\n")
"""


def test_calls_are_timed_by_events(driver: Path, package: Path) -> None:
    result = found(driver, package, PROFILE.replace("GRAPH", "False"))
    document = result["document"]
    assert (document["device"], document["graph"], document["runs"]) == ("cuda:0", False, 2)
    assert document["matched"], document["rows"]
    rows = {row["name"]: row for row in document["rows"]}
    linear = next(row for name, row in rows.items() if "int4_linear" in name)
    assert linear["calls"] == 2 and linear["host_s"] > 0 and linear["seconds"] > 0
    assert any("conftest.py:" in line for line in linear["lines"])
    launched = [row for row in document["rows"] if row["kind"] == "launch"]
    assert any(row["name"].startswith("triton_") for row in launched), rows
    assert "GPU idle" in rows
    # A C function's kernels are inside of it, and have times of their own.
    functions = [e for e in result["gpu"] if e["cat"] == "function" and "int4_linear" in e["name"]]
    kernels = [e for e in result["gpu"] if e["cat"] == "launch"]
    assert len(functions) == 4
    for event in functions:
        inside = [k for k in kernels if event["ts"] <= k["ts"] and k["ts"] + k["dur"] <= event["ts"] + event["dur"]]
        assert inside and not inside[0]["name"].startswith("_Z"), "names are demangled"
    assert len([e for e in result["host"] if e["cat"] == "run"]) == 2
    assert not [line for line in result["events"] if line.startswith("record_external")]


def test_kernels_of_graphs_are_timed_by_nodes(driver: Path, package: Path) -> None:
    result = found(driver, package, PROFILE.replace("GRAPH", "True"), GRAPHS=1)
    document = result["document"]
    assert document["graph"] and document["matched"], document["rows"]
    external = [line for line in result["events"] if line.startswith("record_external")]
    replays = [line for line in result["events"] if line.startswith("replay")]
    assert len(replays) == 3 and external
    # Two events a range, in each of the two captures of a graph; replays record no more.
    assert len(external) % 4 == 0
    linear = next(row for row in document["rows"] if "int4_linear" in row["name"])
    assert linear["calls"] == 2 and linear["host_s"] == 0
    assert {event["cat"] for event in result["host"]} == {"run", "replay"}


def test_nothing_is_recorded_without_a_profile(driver: Path, package: Path) -> None:
    script = """
program = untorch.load(path)
x = untorch._core.to_device(np.ones((4, 500), np.float16), 0)
program["int4"].run([x])
program["int4"].run([x])
found["records"] = sum(line.startswith("record") for line in fake.fake_events().decode().split("\\n"))
untorch.profile(path, [np.ones((4, 500), np.float16)], method="int4", runs=1, roofline=False)
found["after"] = sum(line.startswith("record") for line in fake.fake_events().decode().split("\\n"))
program["int4"].run([x])
found["again"] = sum(line.startswith("record") for line in fake.fake_events().decode().split("\\n"))
"""
    result = found(driver, package, script)
    assert result["after"] > result["records"] + 8
    assert result["again"] - result["after"] <= result["records"]
