"""How pages are staged for the site, without mkdocs: links, hidden code, the navigation, the API reference."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

import untorch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "text", "want"),
    [
        ("README.md", "[a](docs/cli.md#run)", "[a](cli.md#run)"),
        ("docs/cli.md", "[a](../README.md#install) [b](#run)", "[a](index.md#install) [b](#run)"),
        ("docs/migrate/x.md", "[a](../cli.md) [b](y.md)", "[a](../cli.md) [b](y.md)"),
        ("docs/decisions/0001-x.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/cli.md", "![a](images/a.svg)", "![a](images/a.svg)"),
        ("docs/cli.md", "[code](../src/untorch/cli/run.py)", "code (`src/untorch/cli/run.py`)"),
        ("docs/cli.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("docs/cli.md", "```\n[a](../README.md)[k][n]\n```", "```\n[a](../README.md)[k][n]\n```"),
        ("docs/cli.md", "uint8 [k][n], `[k][n]`", "uint8 [k]\\[n], `[k][n]`"),
        ("docs/cli.md", "<!-- setup\nx = 1\n-->\nText", "Text"),
        ("docs/cli.md", "<!-- not run: a GPU -->\n```python\n```", "```python\n```"),
    ],
)
def test_pages_are_staged(script: ModuleType, page: str, text: str, want: str) -> None:
    assert script.stage_page(PurePosixPath(page), text) == want


def test_every_page_is_in_the_navigation(script: ModuleType) -> None:
    listed = re.findall(r"(?:: |- )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {
        str(script.staged_name(PurePosixPath(path.relative_to(ROOT).as_posix())))
        for path in (ROOT / "docs").rglob("*.md")
    }
    pages |= set(script.ROOT_PAGES.values()) | {f"api/{name}.md" for name in script.API}
    decisions = {page for page in pages if re.match(r"decisions/0", page)}
    assert sorted(set(listed)) == sorted(pages - decisions)


def test_the_api_reference_has_every_public_name(script: ModuleType) -> None:
    members = script.API["untorch"][1]
    assert sorted(members) == sorted(name for name in untorch.__all__ if name != "pipeline")
    assert "::: untorch.load" in script.api_page("untorch", members)
