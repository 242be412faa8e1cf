"""``PassReport``: what one graph pass did to one method."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PassReport"]


@dataclass
class PassReport:
    """What one pass did. ``changed`` names nodes; ``skipped`` maps nodes that it looked at to the reason.

    ``not_run`` is the reason why the pass as a whole did not run, if it did not.
    """

    name: str
    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    not_run: str | None = None
