"""Runs Python files in forks of a process that has imported PyTorch and untorch.export: that takes longer than many files.

A file runs as ``python FILE …`` or ``python -m MODULE …`` runs it, in a process that ends with it. What has to begin
without PyTorch needs a process of its own. ``python warm_process.py`` is the process that forks: a job a line in, an exit
status a line out.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_IMPORTED = ("torch._inductor.compile_fx", "untorch.export.exporter")
_started: list[subprocess.Popen[str]] = []


def plain_environment() -> dict[str, str]:
    """For processes that export: without the sanitizers of scripts/sanitize.sh, under which they take far longer."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if "UNTORCH_PLAIN_PYTHONPATH" in environment:
        environment["PYTHONPATH"] = environment["UNTORCH_PLAIN_PYTHONPATH"]
        environment.pop("UNTORCH_LIBRARY", None)
    return environment


def run_warm(
    command: Sequence[object],
    folder: pathlib.Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: int = 600,
) -> subprocess.CompletedProcess[str]:
    """``python COMMAND…`` in the folder: a file, or -m and a module, and arguments."""
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as outputs:
        paths = [os.path.join(outputs, name) for name in ("out", "err")]
        job = {
            "command": words, "folder": str(folder), "timeout": timeout, "outputs": paths,
            "environment": dict(plain_environment() if environment is None else environment),
        }  # fmt: skip
        process = _process()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{json.dumps(job)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the process that forks died with {process.wait()}"
        out, err = (pathlib.Path(path).read_text(errors="replace") for path in paths)
    return subprocess.CompletedProcess(words, int(answer), out, err)


def _process() -> subprocess.Popen[str]:
    if not _started:
        pipe = subprocess.PIPE
        # Inductor looks at this variable when it is imported: no probes of what this CPU runs.
        environment = plain_environment() | {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
        command = [sys.executable, __file__]
        _started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
        atexit.register(_started[0].communicate)
    return _started[0]


def main() -> None:
    """Serves standard input."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # forks share the memory of what is imported, and do not look through it for garbage
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(job))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(job: dict[str, Any]) -> int:
    """The exit status."""
    try:
        for descriptor, path in enumerate((os.devnull, *job["outputs"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        signal.alarm(job["timeout"])
        is_module = job["command"][0] == "-m"
        sys.argv = job["command"][is_module:]
        sys.path[0] = job["folder"] if is_module else os.path.dirname(os.path.abspath(sys.argv[0]))
        given = filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))
        sys.path[1:1] = [path for path in given if path not in sys.path]
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
