"""The packages of kernel_models.py, compiled once and kept under build/test-cache."""

from __future__ import annotations

import pathlib

from tests import packages


def compiled(kind: str) -> pathlib.Path:
    """The package ``kind``."""
    return packages.compiled(pathlib.Path(__file__).with_name("kernel_models.py"), kind)
