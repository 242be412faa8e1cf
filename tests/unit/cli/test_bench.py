"""untorch bench, and the measuring behind it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from untorch.cli.bench_plot import plot_latencies
from untorch.cli.measure import Plan, Times, measure, percentile, summarise


def test_json_document(cli: Callable[..., Any], package: Path) -> None:
    done = cli("bench", package, "--iterations", 20, "--warmup", 2, "--sweep-threads", "1,2", "--dim", "s0=3", "--json")
    assert done.code == 0, done.err
    document = done.document()
    assert set(document) == {
        "file", "file_bytes", "method", "device", "graph", "cuda_graphs", "dequantize_weights", "tf32", "spin_us", "untorch", "cpu_level", "inputs", "warmup",
        "concurrency", "runners", "results", "note", "cold", "plot",
    }  # fmt: skip
    assert document["file_bytes"] == package.stat().st_size
    assert document["inputs"] == [{"name": "x", "dtype": "float32", "shape": [3, 4]}]
    assert document["cold"] is None
    assert [item["threads"] for item in document["results"]] == [1, 2]
    for item in document["results"]:
        assert set(item) == {
            "threads", "load_s", "first_call_s", "calls", "min_s", "mean_s", "p50_s", "p90_s", "p99_s", "max_s",
            "throughput_per_s", "memory",
        }  # fmt: skip
        assert item["calls"] == 20
        assert 0 < item["min_s"] <= item["p50_s"] <= item["p90_s"] <= item["p99_s"] <= item["max_s"]
        memory = item["memory"]
        assert 0 < memory["before_load_bytes"] <= memory["peak_bytes"]
        assert 0 < memory["after_load_bytes"] <= memory["peak_bytes"]


def test_several_callers(cli: Callable[..., Any], package: Path) -> None:
    done = cli("bench", package, "--iterations", 10, "--concurrency", 3, "--json")
    document = done.document()
    assert (document["concurrency"], document["runners"]) == (3, 3)
    assert document["results"][0]["calls"] == 30


def test_cold_start(cli: Callable[..., Any], package: Path) -> None:
    cold = cli("bench", package, "--iterations", 1, "--cold", "--cold-runs", 2, "--json").document()["cold"]
    assert set(cold) == {"runs", "total_s", "first_total_s", "stages_s", "totals_s"}
    assert set(cold["stages_s"]) == {"interpreter", "import", "load", "first_call"}
    assert all(seconds > 0 for seconds in cold["stages_s"].values())
    assert cold["stages_s"]["import"] > cold["stages_s"]["first_call"] > 1e-7
    assert cold["total_s"] == min(cold["totals_s"]) == pytest.approx(sum(cold["stages_s"].values()))
    assert cold["first_total_s"] == cold["totals_s"][0]


def test_text(cli: Callable[..., Any], package: Path) -> None:
    done = cli("bench", package, "--iterations", 3)
    assert done.code == 0, done.err
    assert "method           forward(x: float32[8, 4])" in done.out
    assert " default " in done.out
    assert "there is no queue" in done.out


@pytest.mark.parametrize("threads", ["", "1,,2", "two", "-1"])
def test_bad_threads(cli: Callable[..., Any], package: Path, threads: str) -> None:
    done = cli("bench", package, f"--sweep-threads={threads}")
    assert done.code == 1
    assert done.err == f"untorch: --sweep-threads {threads}: expected numbers separated by commas, such as 1,2,4\n"


def test_seconds_end_the_measurement() -> None:
    times = measure(lambda: None, Plan(warmup=0, seconds=0.05))
    assert 0.05 <= times.wall < 1
    assert sum(times.latencies) <= times.wall


def test_at_least_one_call() -> None:
    assert len(measure(lambda: None, Plan(warmup=0, seconds=0.0)).latencies) == 1


def test_concurrent_calls_overlap() -> None:
    gate = threading.Barrier(3, timeout=10)
    times = measure(gate.wait, Plan(warmup=2, iterations=4, concurrency=3))
    assert len(times.latencies) == 12


@pytest.mark.parametrize("warmup", [0, 1])
def test_an_error_in_a_thread_is_raised(warmup: int) -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        measure(fail, Plan(warmup=warmup, iterations=1, concurrency=2))


def test_percentiles() -> None:
    assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 0.5, 0.9, 1)] == [1, 3, pytest.approx(4.6), 5]
    assert percentile([7], 0.99) == 7
    summary = summarise(Times([0.2, 0.1, 0.3], 0.5))
    assert (summary["calls"], summary["p50_s"], summary["throughput_per_s"]) == (3, 0.2, 6)
    assert summary["mean_s"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--cuda-graph",), "--cuda-graph: method forward runs on the CPU"),
     (("--cuda-graph", "--concurrency", 2), "--cuda-graph: a graph runs one call at a time: leave --concurrency out"),
     (("--dequantize-weights",), "dequantize_weights: expected a file with methods for a GPU"),
     (("--device", "cuda"), "was compiled for cpu and cannot run on cuda")],
)  # fmt: skip
def test_what_needs_a_gpu(cli: Callable[..., Any], package: Path, arguments: tuple[Any, ...], text: str) -> None:
    done = cli("bench", package, "--iterations", 1, *arguments)
    assert done.code == 1
    assert text in done.err


def test_parts_of_a_gpus_time() -> None:
    from untorch.cli.measure_gpu import _timed

    between: list[int] = []
    times = _timed(lambda: time.sleep(0.001), lambda: between.append(time.sleep(0.02) or 1), Plan(2, 3))
    assert len(times.latencies) == 3
    assert len(between) == 5
    assert max(times.latencies) < 0.02 < times.wall


def test_plot(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    out = tmp_path / "latency.svg"
    done = cli("bench", package, "--iterations", 700, "--sweep-threads", "1,2", "--plot", out, "--json")
    assert done.code == 0, done.err
    root = ElementTree.fromstring(out.read_text())
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    assert texts[0] == "affine.pt2: forward(float32[8, 4]) on cpu"
    assert [text.partition(":")[0] for text in texts if "calls, p50" in text] == ["1 threads", "2 threads"]
    counts = [re.search(r": (\d+) calls$", node.text or "") for node in root.iter() if node.tag.endswith("}title")]
    slower = [int(match[1]) for text in texts if (match := re.search(r"latency.*; (\d+) slower", text))]
    assert sum(int(count[1]) for count in counts if count) + sum(slower) == 1400
    assert any(text.startswith("call (the slowest of every 2)") for text in texts)
    assert done.document()["plot"] == str(out)
    out.unlink()
    assert f"plot written to {out}" in cli("bench", package, "--iterations", 5, "--plot", out).out and out.exists()


def test_plot_of_equal_latencies(tmp_path: Path) -> None:
    plot_latencies(tmp_path / "one.svg", "t", [("one", [0.001]), ("equal", [0.002] * 5)])
    assert "logarithmic" not in (tmp_path / "one.svg").read_text()
    plot_latencies(tmp_path / "wide.svg", "t", [("wide", [0.001] * 95 + [0.05] * 5)])
    text = (tmp_path / "wide.svg").read_text()
    assert ElementTree.fromstring(text) is not None
    assert "latency, logarithmic" in text and "7.07 ms" in text  # the middle between 1 and 50 ms


def test_plot_name(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    done = cli("bench", package, "--plot", tmp_path / "latency.png")
    assert (done.code, done.err) == (
        1, f"untorch: --plot {tmp_path / 'latency.png'}: expected a name that ends with .svg\n",
    )  # fmt: skip
