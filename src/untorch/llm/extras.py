"""Imports optional packages where they are used; a missing one is an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from untorch.runtime.errors import UnsupportedError

__all__ = ["import_extra"]


def import_extra(name: str, purpose: str) -> Any:
    """A module of the extra ``llm``. Raises UnsupportedError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UnsupportedError(f"{purpose} needs the package {package}: pip install 'untorch[llm]'") from error
