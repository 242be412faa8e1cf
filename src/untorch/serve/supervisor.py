"""Several worker processes on one port: started, told of loads and unloads, and started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from untorch.runtime.errors import ModelError, SystemResourceError
from untorch.serve.addresses import Addresses, bind, ending_signals, port_of
from untorch.serve.control import Control
from untorch.serve.options import ServeOptions

__all__ = ["supervise"]

_log = logging.getLogger("untorch.serve")
# A worker that dies sooner than this is started again after a pause, which doubles.
_SHORT_LIFE, _LONGEST_PAUSE = 5.0, 10.0


def supervise(options: ServeOptions, announce: Callable[[Addresses], None] | None) -> None:
    """Serves with ``options.workers`` processes until SIGTERM or SIGINT."""
    with bind(options) as http, _reserve(options) as reserved:
        grpc_port = None if reserved is None else reserved.getsockname()[1]
        try:
            folder = tempfile.mkdtemp(prefix="untorch-metrics-")
        except OSError as error:
            raise SystemResourceError(
                f"workers need a folder for their metrics: {error.strerror}: set TMPDIR", error.errno
            ) from None
        try:
            asyncio.run(_Supervisor(options, http, grpc_port, folder, announce).run())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _reserve(options: ServeOptions) -> Any:
    """Keeps the port of gRPC, on which each worker listens with a socket of its own."""
    if options.grpc_port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reserved.bind((options.host, options.grpc_port))
        except OSError as error:
            raise SystemResourceError(
                f"gRPC cannot listen on {options.host}:{options.grpc_port}: {error.strerror or error}", error.errno
            ) from None
        yield reserved


class _Worker:
    """A process and the connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, control: Control) -> None:
        self.process = process
        self.control = control
        self.applied: dict[int, asyncio.Future[list[str] | None]] = {}
        self.is_ready = False


class _Supervisor:
    def __init__(
        self,
        options: ServeOptions,
        http: socket.socket,
        grpc_port: int | None,
        folder: str,
        announce: Callable[[Addresses], None] | None,
    ) -> None:
        self._options = options
        self._http = http
        self._grpc_port = grpc_port
        self._folder = folder
        self._announce = announce
        self._workers: set[_Worker] = set()
        self._changes: dict[str, bool] = {}
        self._numbers = itertools.count()
        self._changing = asyncio.Lock()
        self._stop = asyncio.Event()
        self._failure: str | None = None
        self._announced = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._stop.set)
        tasks = [asyncio.create_task(self._keep_alive()) for _ in range(self._options.workers)]
        await self._stop.wait()
        self._http.close()  # when the workers have closed theirs, nobody listens
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGTERM)
        # A worker drains within its limit, and then ends by itself; what hangs is killed.
        _, hanging = await asyncio.wait(tasks, timeout=self._options.drain + 15)
        for worker in self._workers if hanging else ():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise ModelError(self._failure)

    async def _keep_alive(self) -> None:
        """One worker after the other, in one place."""
        pause = 0.1
        while not self._stop.is_set():
            begin = time.monotonic()
            worker = await self._start()
            self._workers.add(worker)
            if self._stop.is_set():
                worker.process.terminate()
            listening = asyncio.create_task(self._listen(worker))
            code = await worker.process.wait()
            self._workers.discard(worker)
            await listening
            for future in worker.applied.values():
                if not future.done():
                    future.set_result(None)
            self._forget(worker.process.pid)
            if self._stop.is_set():
                return
            pause = 0.1 if time.monotonic() - begin > _SHORT_LIFE else min(2 * pause, _LONGEST_PAUSE)
            _log.error("worker %d ended with %s, another one starts in %.1f s", worker.process.pid, code, pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    async def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._folder}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "untorch.serve.worker", str(self._http.fileno()), str(theirs.fileno()),
                pass_fds=(self._http.fileno(), theirs.fileno()), env=environment, stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        control = await Control.open(ours)
        options = dataclasses.replace(self._options, grpc_port=self._grpc_port)
        first = {"options": options.to_json(), "changes": self._changes, "loads_first": self._announced}
        await control.send(first)
        return _Worker(process, control)

    async def _listen(self, worker: _Worker) -> None:
        answers: set[asyncio.Task[None]] = set()
        async for message in worker.control:
            if message.get("event") == "ready":
                worker.is_ready = True
                self._announce_once()
            elif message.get("event") == "failed":
                if not self._announced:  # what fails at the start fails for all
                    self._failure = message["error"]
                    self._stop.set()
            elif "applied" in message:
                future = worker.applied.pop(message["applied"], None)
                if future is not None and not future.done():
                    future.set_result(message["error"])
            elif "ask" in message:
                task = asyncio.create_task(self._change(worker, message))
                answers.add(task)
                task.add_done_callback(answers.discard)
        await worker.control.close()

    def _announce_once(self) -> None:
        if self._announced or sum(worker.is_ready for worker in self._workers) < self._options.workers:
            return
        self._announced = True
        if self._announce is not None:
            self._announce(Addresses(self._options, port_of(self._http), self._grpc_port))

    async def _change(self, origin: _Worker, message: dict[str, Any]) -> None:
        """Loads or unloads in all workers. The first error is the answer."""
        async with self._changing:
            number, waiting = next(self._numbers), []
            order = {"apply": number, "action": message["action"], "name": message["name"]}
            for worker in list(self._workers):
                future: asyncio.Future[list[str] | None] = asyncio.get_running_loop().create_future()
                worker.applied[number] = future
                waiting.append(future)
                await worker.control.send(order)
            found = [error for error in await asyncio.gather(*waiting) if error is not None]
            if not found:
                self._changes[message["name"]] = message["action"] == "load"
        await origin.control.send({"answer": message["ask"], "error": found[0] if found else None})

    def _forget(self, pid: int) -> None:
        """Gauges of a process that is gone do not count."""
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = self._folder
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]
