"""Methods that are compiled beside this process: how many at a time, in which order, and what ends them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export import CompileError, exporter
from untorch.export.exporter import _compile_methods
from untorch.export.method import Method, Traced
from untorch.export.target import CpuTarget, InductorRun
from untorch.progress import Progress


@dataclass
class Compiler:
    """Stands for ``begin_compile``. events: what happened, in turn. fails: the method whose compile does."""

    beside: bool = True
    fails: str | None = None
    events: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def __call__(self, method: Method, folder: Path, progress: Progress) -> Any:
        assert folder.is_dir()
        name = folder.name
        self.events.append(f"begin {name}")

        def finish() -> None:
            self.events.append(f"finish {name}")
            if self.fails == name:
                raise CompileError("no")

        run = InductorRun(
            lambda: None,  # type: ignore[arg-type, return-value]
            lambda: not self.beside or name in self.done,
            lambda: self.events.append(f"stop {name}"),
        )
        made: Any = type("Begun", (), {"method": method, "run": run, "finish": staticmethod(finish)})
        return made

    def meanwhile(self) -> None:
        self.events.append("meanwhile")


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> list[Method]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    module: Any = program.module()
    made = [Method(name, nn.Linear(2, 2), target=CpuTarget()) for name in ("one", "two", "three", "two")]
    for method in made:
        method.traced = Traced(program, module)
    return made


def test_as_many_at_a_time_as_there_are_cores(
    methods: list[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler()
    monkeypatch.setattr(exporter, "begin_compile", compiler)
    found = list(_compile_methods(methods, tmp_path, Progress(False), compiler.meanwhile))
    variant = f"two.{methods[3].target.code_name}"
    assert [one.place for one in found] == ["one", "two", "three", variant]
    assert [one.method for one in found] == methods
    assert compiler.events == [
        "begin one", "begin two", "meanwhile", "finish one", "begin three", "finish two", f"begin {variant}",
        "finish three", f"finish {variant}",
    ]  # fmt: skip


def test_those_that_have_ended_wait_for_nothing(
    methods: list[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, a method is written before the next one begins, as its weights take memory."""
    compiler = Compiler(beside=False)
    monkeypatch.setattr(exporter, "begin_compile", compiler)
    for one in _compile_methods(methods[:3], tmp_path, Progress(False), compiler.meanwhile):
        assert [event for event in compiler.events if event != "meanwhile"][-2:] == [
            f"begin {one.place}", f"finish {one.place}",
        ]  # fmt: skip
    assert compiler.events[1] == "meanwhile"
    assert len(compiler.events) == 7


@pytest.mark.parametrize("closes", [False, True])
def test_what_fails_ends_the_others(
    closes: bool, methods: list[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(fails=None if closes else "one")
    monkeypatch.setattr(exporter, "begin_compile", compiler)
    running = _compile_methods(methods, tmp_path, Progress(False), compiler.meanwhile)
    if closes:  # what is done with the method's code fails
        next(running)
        running.close()
    else:
        with pytest.raises(CompileError, match="no"):
            next(running)
    assert compiler.events == ["begin one", "begin two", "meanwhile", "finish one", "stop two"]
