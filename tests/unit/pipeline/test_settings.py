"""The manifest's member "pipeline", and packages that have none."""

from __future__ import annotations

import subprocess
import sys

import pytest

import untorch
from untorch.pipeline.settings import read_settings
from untorch.runtime.errors import FileMissingError, InvalidFileError, UnsupportedError


@pytest.mark.parametrize(
    ("manifest", "error", "text"),
    [
        ({}, InvalidFileError, "m.pt2 holds no pipeline: packages with one are made by untorch export DIR"),
        ({"llm": {}}, InvalidFileError, "use untorch.llm.Engine"),
        ({"pipeline": {"format_version": 9}}, UnsupportedError, "its pipeline has format 9, this untorch reads 1"),
    ],
)
def test_manifests_that_are_refused(manifest: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        read_settings(manifest, "m.pt2")


def test_values_are_checked() -> None:
    settings = read_settings({"pipeline": {"format_version": 1, "labels": [1], "size": True}}, "m.pt2")
    with pytest.raises(InvalidFileError, match=r"labels: expected a list of strings, got \[1\]"):
        settings.texts("labels")
    with pytest.raises(InvalidFileError, match="size: expected int, got True"):
        settings.get("size", int)
    assert settings.optional("nothing", int) is None


def test_a_file_that_is_missing() -> None:
    with pytest.raises(FileMissingError):
        untorch.pipeline("/nowhere/model.pt2")


def test_the_name_is_the_module_and_the_function() -> None:
    """In both orders, and without an import of an optional package."""
    code = (
        "import untorch, sys; f = untorch.pipeline; import untorch.pipeline.text; assert callable(untorch.pipeline) "
        "and f is untorch.pipeline; print(*({'torch', 'PIL', 'tokenizers', 'soundfile'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
