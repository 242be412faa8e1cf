"""Opens files in a process of its own: a line of JSON with a path in, a line with what happened out.

``Prober`` keeps such a process and starts a new one when it dies; a death is reported as "crash: <signal>".
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import sys
from collections.abc import Iterable

TIMEOUT = 60.0


def _open(path: str) -> str:
    import numpy

    import untorch

    try:
        with untorch.load(path) as program:
            for name in program.methods:
                method = program[name]
                method.open()
            dtype = method.inputs[0].dtype if method.inputs else "float32"
            y = method(numpy.arange(4, dtype=dtype))
            if dtype == "int64":  # rows of a table: generated code raises an exception for those that are not there
                with contextlib.suppress(untorch.ModelError):
                    method(numpy.arange(4, dtype=dtype) + 99)
            return f"ok: {[float(v) for v in numpy.ravel(y)]}"
    except untorch.UntorchError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"unexpected {type(error).__name__}: {error}"


def main() -> None:
    """Serves standard input."""
    import ctypes

    # A file may ask for much memory; that is to fail, not to starve the machine.
    import resource

    if os.environ.get("UNTORCH_PROBE_LIMIT", "1") == "1":
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(1, 9)  # dies with its parent
    for line in sys.stdin:
        print(json.dumps(_open(json.loads(line))), flush=True)


class Prober:
    """Sends files to the process and collects what happened to each."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._path = directory / "probe.pt2"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        return code

    def open(self, data: bytes) -> str:
        """What opening a file of these bytes and running its methods gives."""
        self._path.write_bytes(data)
        return self.open_path(str(self._path))

    def open_path(self, path: str) -> str:
        """The same for a path."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(os.environ),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(path) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(TIMEOUT):
                self._process.kill()
                self._stop()
                return "hang"
        line = self._process.stdout.readline()
        if not line:
            return f"crash: {self._stop()}"
        return str(json.loads(line))

    def refused(self, cases: Iterable[tuple[str, bytes]], allow_ok: bool = False) -> list[str]:
        """Cases that were not answered by InvalidFileError or UnsupportedError, with what happened instead."""
        wrong = []
        good = ("InvalidFileError:", "UnsupportedError:") + (("ok:",) if allow_ok else ())
        for name, data in cases:
            answer = self.open(data)
            if not answer.startswith(good):
                wrong.append(f"{name}: {answer}")
        return wrong


if __name__ == "__main__":
    main()
