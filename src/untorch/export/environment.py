"""Environment variables that libraries read, set for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["environment"]


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable; behind it, it is what it was."""
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
