"""environment(): a variable for a while."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from untorch.export.environment import environment

NAME = "UNTORCH_TEST_VARIABLE"


@pytest.mark.parametrize("old", [None, "before"])
def test_the_variable_is_what_it_was(monkeypatch: pytest.MonkeyPatch, old: str | None) -> None:
    if old is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, old)
    with environment(NAME, "meanwhile"):
        assert os.environ[NAME] == "meanwhile"
    assert os.environ.get(NAME) == old
    with pytest.raises(ZeroDivisionError), environment(NAME, "meanwhile"):
        _ = 1 // 0
    assert os.environ.get(NAME) == old
