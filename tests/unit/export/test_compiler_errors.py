"""A compiler that refuses generated code: one line of it, and a file with the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.exc import CppCompileError

from untorch.export import CompileError, export
from untorch.export.compiler_errors import explain_compiler
from untorch.export.patches.registry import replaced


def explained(output: str) -> tuple[str, Path]:
    try:
        try:
            raise CppCompileError(["/usr/bin/g++", "-c", "a.cpp"], output)
        except CppCompileError as error:
            raise RuntimeError("InductorError") from error
    except RuntimeError as error:
        found = explain_compiler("forward", error)
    assert found is not None
    text, _, log = str(found).partition("\n  All of its output: ")
    return text, Path(log)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "/tmp/x/a.wrapper.cpp: In function 'f':\n/tmp/x/a.wrapper.cpp:8:3: error: 'None' was not declared\n  8 | a\n"
            "/tmp/x/a.wrapper.cpp:9:3: error: later",
            "a.wrapper.cpp:8:3: error: 'None' was not declared",
        ),
        (
            "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
            "g++: fatal error: Killed signal terminated program cc1plus",
        ),
        ("something else\nlast words\n", "last words"),
        ("", "no output"),
        ("a.cpp:1:1: error: " + "x" * 10_000, "a.cpp:1:1: error: " + "x" * 282),
    ],
)
def test_the_first_error(output: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text, log = explained(output)
    assert text == f"method 'forward': g++ did not compile the code that torch generated: {line}"
    assert log.parent == tmp_path
    assert log.read_text() == f"/usr/bin/g++ -c a.cpp\n\n{output}"


def test_other_errors() -> None:
    assert explain_compiler("forward", RuntimeError("no compiler")) is None


class Head(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x[: n.item()] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's own wrapper did for a slice without a start."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def broken(self: Any, node: Any) -> None:
        self.writeline("int64_t start = None;")

    with replaced(CppWrapperCpu, "codegen_dynamic_slice_size", broken), pytest.raises(CompileError) as caught:
        export(Head(), (torch.ones(9), torch.tensor(4)), tmp_path / "head.pt2", progress=False)
    first, second = str(caught.value).splitlines()
    assert re.fullmatch(r"method 'forward': \S+ did not compile .*: \w+\.wrapper\.cpp:\d+:\d+: error: .*None.*", first)
    log = Path(second.partition(": ")[2])
    assert "None" in log.read_text() and len(log.read_text()) > len(first)
    assert isinstance(caught.value.__cause__, Exception)
    assert not (tmp_path / "head.pt2").exists()
