"""Names that a method of a file cannot have, because ``Program`` or ``Session`` has an attribute of that name."""

from __future__ import annotations

from untorch.runtime.program import Program, Session

__all__ = ["reserved_method_names"]


def reserved_method_names() -> frozenset[str]:
    """The public attributes of both classes: ``program.reset`` is not a method of the file."""
    return frozenset(name for owner in (Program, Session) for name in dir(owner) if not name.startswith("_"))
