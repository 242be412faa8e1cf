"""Imports optional packages where they are used; a missing one is an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from untorch.runtime.errors import UnsupportedError

__all__ = ["import_extra"]


def import_extra(module: str, package: str, purpose: str) -> Any:
    """A module of the extra ``pipeline``. Raises UnsupportedError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"pipeline: {purpose} needs the package {package}: pip install 'untorch[pipeline]'"
        ) from error
