"""Draws a run of a profile's trace as an SVG file: ``python scripts/render_profile.py trace.json out.svg``.

The trace is what ``untorch profile -o trace.json`` wrote. The run is that of median length; its events are drawn to
scale, each as wide as it took, and none is left out. Names are cut where they do not fit: pointing at one shows all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from untorch.cli.svg import Svg, fit

_WIDTH, _LEFT, _ROW, _SIZE = 960.0, 64.0, 22.0, 10
_COLOURS = {
    "run": "#e2e8f0", "call": "#cbd5e1", "function": "#93c5fd", "kernel": "#fdba74", "launch": "#fdba74",
    "replay": "#cbd5e1",
}  # fmt: skip
_MEANINGS = (
    ("function", "function of the runtime"),
    ("kernel", "loop of the model's library"),
    ("call", "generated code"),
)

Event = dict[str, Any]


def median_run(trace: dict[str, Any]) -> list[Event]:
    """The events of the host in the run of median length, the run itself first."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    runs = sorted((event for event in events if event["cat"] == "run"), key=lambda event: float(event["dur"]))
    chosen = runs[len(runs) // 2]
    begin, end = chosen["ts"], chosen["ts"] + chosen["dur"]
    inside = [event for event in events if event["cat"] != "run" and begin <= event["ts"] < end]
    return [chosen, *sorted(inside, key=lambda event: (event["ts"], -event["dur"]))]


def depths(events: list[Event]) -> list[int]:
    """How many events are around each, by their times."""
    found, open_ends = [], list[float]()
    for event in events:
        while open_ends and event["ts"] >= open_ends[-1]:
            open_ends.pop()
        found.append(len(open_ends))
        open_ends.append(event["ts"] + event["dur"])
    return found


def step_of(length: float) -> float:
    """The distance of marks on the axis: 1, 2 or 5 times a power of ten, five to twelve of them."""
    step = 10.0 ** (len(str(int(length))) - 2)
    return next(step * factor for factor in (1, 2, 5, 10) if length / (step * factor) <= 12)


def draw(trace: dict[str, Any]) -> str:
    """The picture, SVG."""
    events = median_run(trace)
    start, length = events[0]["ts"], events[0]["dur"]
    scale = (_WIDTH - _LEFT - 16) / length
    picture = Svg(_WIDTH)
    other = trace["otherData"]
    picture.text(
        16, 24, f"{Path(other['file']).name}: one run of {other['method']} on {other['device']}", 14, weight=600
    )
    x = 16.0
    for category, meaning in _MEANINGS:
        picture.rectangle(x, 36, 12, 12, _COLOURS[category], radius=2)
        picture.text(x + 18, 46, meaning, 11)
        x += 30 + 6.5 * len(meaning)
    top, rows = 76.0, depths(events)
    bottom = top + _ROW * (max(rows) + 1)
    mark, step = 0.0, step_of(length)
    while mark <= length:
        at = _LEFT + mark * scale
        picture.line(at, top - 6, at, bottom, "#e2e8f0")
        picture.text(at, top - 10, f"{mark:g} µs", 9, "#475569", anchor="middle")
        mark += step
    for depth, label in enumerate(("run", "call")):
        picture.text(_LEFT - 8, top + depth * _ROW + 14, label, _SIZE, "#475569", anchor="end")
    for event, depth in zip(events, rows, strict=True):
        left, width = _LEFT + (event["ts"] - start) * scale, max(event["dur"] * scale, 0.25)
        y = top + depth * _ROW
        lines = ", ".join(event["args"].get("lines", ()))
        tooltip = f"{event['name']}: {event['dur']:.2f} µs" + (f"\n{lines}" if lines else "")
        picture.rectangle(left, y, width, _ROW - 3, _COLOURS[event["cat"]], radius=1, tooltip=tooltip)
        if width > 24:
            picture.text(left + 3, y + 13, fit(event["name"], width - 6, _SIZE), _SIZE)
    return picture.render(f"a run of {Path(other['file']).name}, from its trace")


def main(trace: str, out: str) -> None:
    """Reads the trace, writes the picture."""
    Path(out).write_text(draw(json.loads(Path(trace).read_text())), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
