"""The page's tables of parameters are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from untorch.serve.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS, TRANSCRIPTIONS, Parameter
from untorch.serve.openai.tools import FORMATS

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "openai-api.md").read_text()


def rows(name: str) -> dict[str, str]:
    """The cells of a table by those on their left."""
    table = PAGE[PAGE.index(f"| {name} | |\n") :].split("\n\n")[0]
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "table"),
    [("chats", CHAT), ("completions", COMPLETIONS), ("embeddings", EMBEDDINGS), ("transcriptions", TRANSCRIPTIONS)],
)
def test_the_page_names_every_parameter(name: str, table: dict[str, Parameter]) -> None:
    found = rows(name)
    served = re.findall(r"`(\w+)`", found["served"] + found.get("served, as in vLLM", ""))
    assert sorted(served) == sorted(key for key, one in table.items() if one.how == "served")
    accepted = re.findall(r"`(\w+)`", found["accepted without effect"])
    assert sorted(accepted) == sorted(key for key, one in table.items() if one.how == "accepted")
    refused = re.findall(r"`(\w+)`(?: \(([^)]*)\))?", found.get("refused, but for the value in brackets", ""))
    assert {key: tuple(json.loads(value) for value in re.findall("`([^`]+)`", values)) for key, values in refused} == {
        key: one.neutral for key, one in table.items() if one.how == "refused"
    }


def test_the_page_names_every_format() -> None:
    table = PAGE[PAGE.index("| format | models |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(FORMATS)
