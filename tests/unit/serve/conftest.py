"""A server's state with a language model."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from tests.unit.llm.fake import TextRunner
from untorch.llm import Engine
from untorch.serve.language_model import LanguageModel
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Package
from untorch.serve.state import ServerState


@pytest.fixture
def state() -> Iterator[ServerState]:
    """With the language model "lm", which says "hello" to everything."""
    state = ServerState(ServeOptions(repository="/nowhere", page=False))
    engine = Engine(TextRunner("hello"))
    package = Package("lm", "lm.pt2", {"lm": LanguageModel("lm", engine, state.metrics)}, engine=engine)
    state.repository._entries["lm"] = entry = types.SimpleNamespace(
        path="lm.pt2", package=None, state="", reason="", lock=None
    )
    state.repository._exchange(entry, package)  # type: ignore[arg-type]
    state.loaded = True
    yield state
    package.close()
