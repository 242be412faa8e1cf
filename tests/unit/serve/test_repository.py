"""Packages that are loaded again or unloaded while they are called."""

from __future__ import annotations

import asyncio
import pathlib
import threading
import time
from typing import Any

import pytest

import untorch
from tests.unit.serve.openai.api import ScriptRunner
from tests.unit.serve.test_app import call
from untorch.llm import Engine
from untorch.runtime.errors import InvalidFileError
from untorch.serve.app import build_app
from untorch.serve.errors import ModelNotFoundError, NotReadyError
from untorch.serve.language_model import LanguageModel
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Package, Repository
from untorch.serve.state import ServerState


@pytest.mark.slow
def test_a_language_model_that_is_loaded_again_loses_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both protocols: calls that run end, and those that find the old engine closed go to the new one."""
    monkeypatch.setattr(Repository, "_open", open_text_model)
    state = ServerState(ServeOptions(models={"lm": "lm.pt2"}, page=False))
    asyncio.run(state.load_all())
    app, stop, answers = build_app(state.options, state), threading.Event(), []
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    requests = [
        ("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 40}),
        ("/v1/chat/completions", {"model": "lm", "messages": [{"role": "user", "content": "a"}]}),
        ("/v2/models/lm/infer", {"inputs": [tensor]}),
    ]

    def ask(path: str, body: Any) -> None:
        while not stop.is_set():
            answers.append(call(app, "POST", path, body))

    threads = [threading.Thread(target=ask, args=request) for request in requests]
    for thread in threads:
        thread.start()
    for _ in range(12):
        time.sleep(0.05)
        state.repository.load("lm")
    stop.set()
    for thread in threads:
        thread.join()
    assert len(answers) > 12
    assert all(status == 200 and b"Hello, everybody" in body for status, _, body in answers), answers
    state.repository.close()


def test_packages_are_loaded_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def load(path: str, **options: Any) -> Any:
        given.update(options, path=path)
        raise InvalidFileError("not this time")

    monkeypatch.setattr(untorch, "load", load)
    options = ServeOptions(models={"m": "m.pt2"}, num_runners=2, num_threads=3, cuda_graphs=4, device="cuda:1")
    with pytest.raises(InvalidFileError, match="not this time"):
        Repository(options).load("m")
    assert given == {
        "path": "m.pt2", "num_runners": 2, "num_threads": 3, "cuda_graphs": 4, "device": "cuda:1", "trust": None,
    }  # fmt: skip


def test_a_language_model_is_unloaded_when_its_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repository, "_open", open_text_model)
    repository = Repository(ServeOptions(models={"lm": "lm.pt2"}, drain=20))
    repository.load("lm")
    engine = repository.packages[0].engine
    assert engine is not None
    handle = engine.submit("a")
    repository.unload("lm")
    assert handle.result(0).text == "Hello, everybody"
    repository.load("lm")
    engine = repository.packages[0].engine
    assert engine is not None
    handle = engine.submit("a")
    repository.close()  # the server ends: it has drained before
    assert handle.result(0).finish_reason == "cancelled"


def test_methods_of_a_package_that_is_not_loaded_yet(tmp_path: pathlib.Path) -> None:
    """Clients try again after a 503, and not after a 404."""
    (tmp_path / "cut.pt2").write_bytes(b"PK")
    (tmp_path / "nowhere.pt2").symlink_to(tmp_path / "none")
    repository = Repository(ServeOptions(models={"a.b": "a.pt2"}, repository=str(tmp_path)))
    with pytest.raises(NotReadyError, match="model 'a.b' is not loaded: not loaded"):
        repository.get("a.b.encode")
    with pytest.raises(InvalidFileError):
        repository.load("cut")
    with pytest.raises(NotReadyError, match="model 'cut' is not loaded: .*cut.pt2"):
        repository.get("cut.encode")
    for name in ("a", "a.c", "nowhere", "nowhere.encode", "cu.encode"):
        with pytest.raises(ModelNotFoundError):
            repository.get(name)
    assert [row["name"] for row in repository.index()] == ["a.b", "cut"]


def test_memory_of_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    seen: list[dict[str, Any]] = []

    def engine(path: str, **options: Any) -> Engine:
        seen.append(options)
        raise InvalidFileError("seen")

    monkeypatch.setattr("untorch.llm.Engine", engine)
    options = ServeOptions(models={"lm": "lm.pt2"}, kv_memory="1GiB", snapshot_memory="0")
    with pytest.raises(InvalidFileError, match="seen"):
        Repository(options)._open_language_model(Package("lm", "lm.pt2", {}))
    assert [(one["kv_memory"], one["snapshot_memory"]) for one in seen] == [("1GiB", "0")]


def open_text_model(repository: Repository, name: str, path: str, runner: ScriptRunner | None = None) -> Package:
    """Takes the place of ``Repository._open``."""
    if runner is None:
        runner = ScriptRunner("Hello, everybody")
        runner.pace = 0.005
    engine = Engine(runner, max_batch_tokens=64, max_sequences=8)
    model = LanguageModel(name, engine, timeout=repository._options.llm_timeout, admission=repository.admission)
    return Package(name, path, {name: model}, engine=engine)
