"""One line on stderr, the exit code, and JSON for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from untorch.cli.output import one_line

ROOT = Path(__file__).parents[3]


def run_process(*arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; ``before`` is Python that runs first."""
    code = f"{before}\nfrom untorch.cli import main\nmain()"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment
    )


def test_missing_file(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "no.pt2"
    done = cli("inspect", path)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"untorch: cannot open {path}: No such file or directory\n"


def test_missing_file_as_json(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "no.pt2"
    done = cli("inspect", path, "--json")
    assert done.code == 1
    message = f"cannot open {path}: No such file or directory"
    assert done.document() == {"error": {"type": "FileMissingError", "message": message}}


def test_usage_error(cli: Callable[..., Any]) -> None:
    done = cli("inspect", "--nonsense", "x.pt2")
    assert (done.code, done.out) == (2, "")
    assert done.err == "untorch: No such option: --nonsense; see untorch inspect --help\n"


def test_unknown_command(cli: Callable[..., Any]) -> None:
    done = cli("dance")
    assert done.code == 2
    assert done.err.startswith("untorch: No such command 'dance'")
    assert done.err.count("\n") == 1


def test_usage_error_as_json(cli: Callable[..., Any]) -> None:
    done = cli("inspect", "--json")
    assert done.code == 2
    assert done.document()["error"]["message"].startswith("Missing argument")


def test_no_command_prints_help(cli: Callable[..., Any]) -> None:
    done = cli()
    assert (done.code, done.out) == (2, "")
    for name in ("export", "run", "bench", "inspect", "ops", "doctor", "quantize-report"):
        assert f" {name} " in done.err


def test_version(cli: Callable[..., Any]) -> None:
    import untorch

    done = cli("--version")
    assert (done.code, done.out) == (0, f"{untorch.__version__}\n")


def test_debug_shows_the_traceback(cli: Callable[..., Any], tmp_path: Path) -> None:
    plain, debug = cli("inspect", tmp_path / "no.pt2"), cli("inspect", tmp_path / "no.pt2", "--debug")
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last)" in debug.err
    assert debug.err.splitlines()[-1] == plain.err.strip()


def test_a_bug_is_one_line_too(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("untorch.cli.process.exported_functions", fail)
    done = cli("ops")
    assert done.code == 1
    assert done.err == "untorch: RuntimeError: first; second (--debug shows where)\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [("a", "a"), ("a:\n  b\n  c", "a: b; c"), ("a\n\nb", "a; b"), ("", "")],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_typer_or_rich(package: str) -> None:
    done = run_process("ops", before=f"import sys; sys.modules[{package!r}] = None")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "untorch: the command line needs typer and rich: pip install 'untorch[cli]'\n"


def test_module_entry_point() -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-m", "untorch", "ops", "--json", "--match", "mm_out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "mm_out" in json.loads(done.stdout)["operators"]


def test_closed_pipe_is_quiet() -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = f"{sys.executable} -m untorch ops | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_torch_is_never_imported(package: Path) -> None:
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    for arguments in (("inspect", package), ("run", package, "--input", "x=zeros"), ("ops",), ("doctor",)):
        done = run_process(*arguments, before=check)
        assert done.stderr == "False\n", arguments
