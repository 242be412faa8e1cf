"""Thoughts are split off, however the text is cut."""

from __future__ import annotations

import pytest

from untorch.serve.openai.reasoning import ThoughtSplitter

CASES = [
    ("<think>\nWell </thin <b>\n\nso\n</think>\n\nYes </think>.", False, "Well </thin <b>\n\nso", "Yes </think>."),
    (" \n<think>a</think>b", False, "a", "b"),
    ("<thin> no", False, "", "<thin> no"),
    ("Yes <think>", False, "", "Yes <think>"),
    ("Well</think> \n Yes", True, "Well", "Yes"),
    ("Well </thi", True, "Well </thi", ""),
    ("</think>Yes\n", True, "", "Yes\n"),
    ("<think>", False, "", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "thought", "answer"), CASES)
def test_every_cut(text: str, is_open: bool, thought: str, answer: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        splitter = ThoughtSplitter(is_open)
        parts = [part for piece in pieces for part in splitter.append(piece)] + splitter.finish()
        assert "".join(text for kind, text in parts if kind == "thought") == thought
        assert "".join(text for kind, text in parts if kind == "answer") == answer


def test_thoughts_come_before_they_are_whole() -> None:
    assert ThoughtSplitter().append("<think>Well, ") == [("thought", "Well,")]
