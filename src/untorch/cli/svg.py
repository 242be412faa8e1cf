"""Writes SVG: shapes and texts with escaped contents, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from untorch.runtime.text import escape_controls

__all__ = ["Svg", "fit"]

_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, monospace"
_WIDTH_OF_CHARACTER = 0.56  # of the font's size, on average


class Svg:
    """A picture that grows downwards. Coordinates are pixels; colours are CSS colours."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._parts: list[str] = []

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 4,
        tooltip: str = "",
    ) -> None:  # fmt: skip
        """A rectangle with round corners; the tooltip shows where the pointer is."""
        self._grow(y + height)
        self._element(
            "rect", {"x": x, "y": y, "width": width, "height": height, "rx": radius, "fill": fill, "stroke": stroke},
            f"<title>{_text(tooltip)}</title>" if tooltip else "",
        )  # fmt: skip

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "#94a3b8", width: float = 1) -> None:
        """A straight line."""
        self._grow(max(y1, y2))
        self._element("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": stroke, "stroke-width": width})

    def polyline(self, points: Sequence[tuple[float, float]], stroke: str) -> None:
        """A line through points."""
        self._grow(max((y for _, y in points), default=0))
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._element("polyline", {"points": places, "fill": "none", "stroke": stroke})

    def arrow(self, x: float, y1: float, y2: float, stroke: str = "#94a3b8") -> None:
        """A line down with a head."""
        self.line(x, y1, x, y2 - 4, stroke, 1.5)
        self._element("path", {"d": f"M{x - 4:g} {y2 - 6:g} L{x:g} {y2:g} L{x + 4:g} {y2 - 6:g} Z", "fill": stroke})

    def text(
        self, x: float, y: float, text: str, size: float = 12, fill: str = "#0f172a", weight: int = 400,
        anchor: str = "start", mono: bool = False,
    ) -> None:  # fmt: skip
        """A line of text whose baseline is at y."""
        self._grow(y + size * 0.3)
        attributes: dict[str, Any] = {"x": x, "y": y, "font-size": size, "fill": fill}
        if weight != 400:
            attributes["font-weight"] = weight
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if mono:
            attributes["font-family"] = _MONO
        self._element("text", attributes, _text(text))

    def render(self, title: str) -> str:
        """The document."""
        height = self.height + 16
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{height:g}" '
            f'viewBox="0 0 {self.width:g} {height:g}" font-family="{escape(_FONT)}" role="img">'
            f"<title>{_text(title)}</title>"
            f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(self._parts)}</svg>\n'
        )

    def _grow(self, y: float) -> None:
        self.height = max(self.height, y)

    def _element(self, name: str, attributes: dict[str, Any], content: str = "") -> None:
        shown = " ".join(
            f'{key}="{round(value, 2):g}"' if isinstance(value, float) else f'{key}="{escape(str(value))}"'
            for key, value in attributes.items()
        )
        self._parts.append(f"<{name} {shown}>{content}</{name}>" if content else f"<{name} {shown}/>")


def fit(text: str, width: float, size: float) -> str:
    """The text, cut with "…" where it would be wider than that, on average."""
    room = int(width / (size * _WIDTH_OF_CHARACTER))
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


def _text(text: str) -> str:
    return escape(escape_controls(text))
