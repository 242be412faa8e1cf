"""``untorch bench --plot``: latencies as a histogram, and over the calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from untorch.cli.measure import percentile
from untorch.cli.output import seconds_text
from untorch.cli.svg import Svg
from untorch.files import write_text
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["check_plot", "plot_latencies", "title_of"]

_WIDTH, _MARGIN, _PLOT, _HEIGHT, _GAP = 1120, 60, 470, 220, 90
_BINS, _POINTS = 60, 470
_LOG_FROM = 8  # times the lowest
_SHOWN = 0.995  # of the calls are within the histogram's range
_BAR, _LINE, _AXIS = "#60a5fa", "#2563eb", "#475569"
_MARKS = ((0.5, "p50", "#15803d"), (0.9, "p90", "#d97706"), (0.99, "p99", "#be123c"))


def check_plot(path: Path) -> None:
    """Raises InvalidArgumentError unless the name ends with .svg."""
    if path.suffix.lower() != ".svg":
        raise InvalidArgumentError(f"--plot {path}: expected a name that ends with .svg")


def plot_latencies(path: Path, title: str, series: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Draws a row for each series, a label and the seconds of its calls in their order."""
    picture = Svg(_WIDTH)
    picture.text(_MARGIN, 36, title, 18, weight=700)
    y = 80.0
    for label, seconds in series:
        ordered = sorted(seconds)
        marks = [(name, percentile(ordered, share), colour) for share, name, colour in _MARKS]
        text = ", ".join(f"{name} {seconds_text(value)}" for name, value, _ in marks)
        picture.text(_MARGIN, y - 12, f"{label}: {len(ordered)} calls, {text}", 13, "#334155", 600)
        _histogram(picture, _MARGIN, y, ordered, marks)
        _over_calls(picture, _WIDTH - _MARGIN - _PLOT, y, seconds, marks)
        y += _HEIGHT + _GAP
    write_text(path, picture.render(title))


def _histogram(picture: Svg, x: float, y: float, ordered: list[float], marks: list[tuple[str, float, str]]) -> None:
    low, high = ordered[0], max(percentile(ordered, _SHOWN), marks[-1][1])
    place, value_at, is_log = _scale(low, high)
    counts = [0] * _BINS
    for value in ordered:
        if value <= high:
            counts[min(int(place(value) * _BINS), _BINS - 1)] += 1
    most = max(counts)
    bar = _PLOT / _BINS
    for number, count in enumerate(counts):
        if not count:
            continue
        height = max(_HEIGHT * count / most, 1)
        begin, end = (seconds_text(value_at((number + side) / _BINS)) for side in (0, 1))
        tooltip = f"{begin} to {end}: {count} calls"
        picture.rectangle(x + number * bar, y + _HEIGHT - height, bar - 1, height, _BAR, radius=1, tooltip=tooltip)
    for row, (name, value, colour) in enumerate(marks):
        at = x + _PLOT * place(value)
        picture.line(at, y, at, y + _HEIGHT, colour, 1.5)
        picture.text(at + 3, y + 10 + 12 * row, name, 10, colour, 600)
    _axis(picture, x, y, [(value_at(share), x + _PLOT * share) for share in (0, 0.5, 1)])
    above = sum(value > high for value in ordered)
    caption = ("latency, logarithmic" if is_log else "latency") + (
        f"; {above} slower calls are not shown" if above else ""
    )
    picture.text(x + _PLOT / 2, y + _HEIGHT + 34, caption, 11, _AXIS, anchor="middle")


def _over_calls(
    picture: Svg, x: float, y: float, seconds: Sequence[float], marks: list[tuple[str, float, str]]
) -> None:
    """The slowest call of each step, so that an outlier is never left out; from 0 up unless it is logarithmic."""
    step = math.ceil(len(seconds) / _POINTS)
    points = [max(seconds[at : at + step]) for at in range(0, len(seconds), step)]
    top = max(points) * 1.05 or 1e-9
    is_log = top > _LOG_FROM * min(points) > 0
    place, _, _ = _scale(min(points) / 1.5 if is_log else 0.0, top, is_log)
    across = _PLOT / max(len(points) - 1, 1)
    places = [(x + number * across, y + _HEIGHT * (1 - place(value))) for number, value in enumerate(points)]
    for name, value, colour in marks:
        at = y + _HEIGHT * (1 - max(place(value), 0))
        picture.line(x, at, x + _PLOT, at, colour, 0.8)
        if name == "p50":
            picture.text(x - 6, at + 4, seconds_text(value), 10, colour, anchor="end")
    picture.polyline(places, _LINE)
    if len(places) == 1:
        picture.rectangle(x - 2, places[0][1] - 2, 4, 4, _LINE)
    picture.text(x - 6, y + 8, seconds_text(top), 10, _AXIS, anchor="end")
    _axis(picture, x, y, [])
    picture.text(x, y + _HEIGHT + 18, "1", 10, _AXIS, anchor="middle")
    picture.text(x + _PLOT, y + _HEIGHT + 18, str(len(seconds)), 10, _AXIS, anchor="middle")
    caption = "call" + (f" (the slowest of every {step})" if step > 1 else "")
    caption += "; latency is logarithmic" if is_log else ""
    picture.text(x + _PLOT / 2, y + _HEIGHT + 34, caption, 11, _AXIS, anchor="middle")


def _scale(
    low: float, high: float, is_log: bool | None = None
) -> tuple[Callable[[float], float], Callable[[float], float], bool]:
    """From a value to its place from 0 to 1, and back. Logarithmic where the range is wide, unless it is given."""
    if is_log is None:
        is_log = low > 0 and high > _LOG_FROM * low
    if is_log:
        span = math.log(high / low)
        return lambda value: math.log(value / low) / span, lambda place: low * math.exp(span * place), True
    width = (high - low) or low or 1e-9
    return lambda value: (value - low) / width, lambda place: low + width * place, False


def _axis(picture: Svg, x: float, y: float, ticks: Sequence[tuple[float, float]]) -> None:
    picture.line(x, y + _HEIGHT, x + _PLOT, y + _HEIGHT, _AXIS)
    picture.line(x, y, x, y + _HEIGHT, _AXIS)
    for value, at in ticks:
        picture.text(at, y + _HEIGHT + 18, seconds_text(value), 10, _AXIS, anchor="middle")


def title_of(document: dict[str, Any]) -> str:
    """What was measured, in a line."""
    inputs = ", ".join(f"{item['dtype']}{item['shape']}" for item in document["inputs"])
    return f"{Path(document['file']).name}: {document['method']}({inputs}) on {document['device']}"
