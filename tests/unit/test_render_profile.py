"""scripts/render_profile.py: the run of median length, to scale, with everything that the trace has of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_profile", ROOT / "scripts" / "render_profile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def event(name: str, category: str, begin: float, length: float, process: int = 1) -> dict[str, Any]:
    return {
        "ph": "X", "pid": process, "tid": 1, "name": name, "cat": category, "ts": begin, "dur": length,
        "args": {"lines": ["net.py:3"]} if category == "kernel" else {},
    }  # fmt: skip


def trace() -> dict[str, Any]:
    events = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "host"}}]
    for number, (begin, length) in enumerate(((0.0, 90.0), (1000.0, 100.0), (2000.0, 5000.0))):
        events.append(event(f"forward.run #{number}", "run", begin, length))
        events.append(event("forward", "call", begin + 5, length - 10))
        events.append(event("packed_linear", "function", begin + 10, length / 2))
        events.append(event("loop <0>", "kernel", begin + 12, length / 10))
    events.append(event("gpu", "launch", 1000.0, 50.0, process=2))
    return {"traceEvents": events, "otherData": {"file": "a/m.pt2", "method": "forward", "device": "cpu"}}


def test_the_median_run_is_drawn_to_scale(script: ModuleType) -> None:
    assert [one["name"] for one in script.median_run(trace())] == [
        "forward.run #1", "forward", "packed_linear", "loop <0>",
    ]  # fmt: skip
    assert script.depths(script.median_run(trace())) == [0, 1, 2, 3]
    root = ElementTree.fromstring(script.draw(trace()))
    bars = [node for node in root.iter() if node.tag.endswith("}rect") and len(node)]
    tooltips = [bar[0].text for bar in bars]
    assert tooltips == [
        "forward.run #1: 100.00 µs", "forward: 90.00 µs", "packed_linear: 50.00 µs", "loop <0>: 10.00 µs\nnet.py:3",
    ]  # fmt: skip
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert widths == pytest.approx([widths[0], widths[0] * 0.9, widths[0] / 2, widths[0] / 10], rel=1e-3)
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    assert texts[0] == "m.pt2: one run of forward on cpu" and "100 µs" in texts and "packed_linear" in texts


@pytest.mark.parametrize(("length", "step"), [(100, 10), (643, 100), (1200, 100), (9, 1), (25, 5)])
def test_marks_of_the_axis(script: ModuleType, length: float, step: float) -> None:
    assert script.step_of(length) == step
    assert length / step <= 12
