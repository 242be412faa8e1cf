"""An archive that is signed and verified; nothing in it is opened."""

from __future__ import annotations

from pathlib import Path

import craft
import pytest


def write_archive(path: Path, *, library: bytes = b"library", weight: bytes = craft.WEIGHT, top: str = "model") -> Path:
    path.write_bytes(craft.Package(library, craft.manifest("x86_64"), weight, top).bytes())
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "model.pt2")
