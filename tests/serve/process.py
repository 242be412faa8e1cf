"""Starts ``untorch serve`` in the environment where packages are run, which has no torch."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

RUN_PYTHON = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)


class Server:
    """A process that serves. ``http`` and ``grpc`` are ``host:port``."""

    def __init__(self, process: subprocess.Popen[str], log: pathlib.Path) -> None:
        self.process = process
        self.log = log
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            process.wait()
            raise AssertionError(f"the server did not start:\n{log.read_text()}")
        self.addresses = json.loads(line)
        if "error" in self.addresses:
            process.wait(20)
            raise AssertionError(f"the server did not start, and ended with {process.returncode}:\n{log.read_text()}")
        self.http = self.addresses["http"].partition("://")[2]
        self.grpc = self.addresses.get("grpc")

    @property
    def pid(self) -> int:
        return self.process.pid

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. A body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.http, timeout=30)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return (
                response.status,
                {key.lower(): value for key, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, _, data = self.request(method, path, body, headers)
        return status, json.loads(data)

    def infer(self, model: str, x: list[list[float]], **fields: Any) -> tuple[int, Any]:
        """A call of the model ``linear``."""
        tensor = {"name": "x", "datatype": "FP32", "shape": [len(x), len(x[0])], "data": x}
        return self.json("POST", f"/v2/models/{model}/infer", {"inputs": [tensor], **fields})

    def workers(self) -> list[int]:
        """The processes' ids."""
        children = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def serve(
    folder: pathlib.Path, *arguments: str | pathlib.Path, command: Sequence[str] = (), **environment: str
) -> Iterator[Server]:
    """A server on free ports; stopped at the end. ``command`` is another one than ``untorch serve``."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    words = list(map(str, arguments))
    for option in ("--port", "--grpc-port"):
        words += [] if option in words else [option, "0"]
    command = [RUN_PYTHON, *(command or ("-m", "untorch", "serve", *words, "--json"))]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **environment}
        )
        try:
            yield Server(process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.stdout is not None:
                process.stdout.close()


def linear(x: list[list[float]]) -> list[list[float]]:
    """What the model ``linear`` of tests/unit/models.py computes."""
    return [[sum(a * (4 * row + i) for i, a in enumerate(values)) + 10 * (row + 1) for row in range(3)] for values in x]


def eventually(check: Any, seconds: float = 15) -> Any:
    """The first true value of ``check()``."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            value = check()
            if value:
                return value
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
