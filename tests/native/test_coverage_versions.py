"""The shim headers of newer PyTorch versions than the installed one: their names, kept as lists, are covered too.

A list is made by ``scripts/list_shims.py INCLUDE_DIRECTORY`` from the headers of that version.
"""

from __future__ import annotations

import pathlib

import pytest
from test_coverage import library_path, list_shims, unsupported

LISTS = sorted((pathlib.Path(__file__).parent / "data").glob("declared_*.txt"))

# Bridges to Python objects of torch, and Metal: there is no such object and no such device here.
NEVER = ("_pyobject", "torch_mps_")


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_names_of_newer_versions_are_covered(path: pathlib.Path) -> None:
    names = path.read_text().split()
    assert len(names) > 300
    missing = set(list_shims.missing(names, pathlib.Path(library_path()))) - unsupported.keys()
    assert sorted(name for name in missing if not any(part in name for part in NEVER)) == []


def test_lists() -> None:
    assert [path.stem for path in LISTS] == ["declared_2.14.1", "declared_2.15.0"]
