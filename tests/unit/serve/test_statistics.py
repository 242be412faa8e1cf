"""Counters of the statistics extension."""

from __future__ import annotations

from untorch.serve.statistics import Statistics


def test_counters() -> None:
    statistics = Statistics()
    empty = statistics.to_json("m", "1")
    assert (empty["inference_count"], empty["execution_count"], empty["batch_stats"]) == (0, 0, [])
    statistics.request(True, 0.5)
    statistics.request(False, 0.25)
    statistics.waited(0.125)
    statistics.executed(2, 6, 0.5, 10.0)
    statistics.executed(1, 6, 0.25, 11.0)
    statistics.executed(1, 1, 0.25, 12.5)
    found = statistics.to_json("m", "1")
    assert (found["name"], found["version"], found["inference_count"], found["execution_count"]) == ("m", "1", 13, 3)
    stats = found["inference_stats"]
    assert stats["success"] == {"count": 1, "ns": 500_000_000}
    assert stats["fail"] == {"count": 1, "ns": 250_000_000}
    assert stats["queue"] == {"count": 1, "ns": 125_000_000}
    assert stats["compute_infer"] == {"count": 4, "ns": 1_500_000_000}  # each call has its execution's time
    assert stats["compute_output"] == {"count": 4, "ns": 0}
    assert [(row["batch_size"], row["compute_infer"]) for row in found["batch_stats"]] == [
        (1, {"count": 1, "ns": 250_000_000}), (6, {"count": 2, "ns": 750_000_000}),
    ]  # fmt: skip
    assert found["last_inference"] == 12_500
