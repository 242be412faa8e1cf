"""A server process: HTTP by uvicorn and gRPC in one event loop, until SIGTERM; then it drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import uvicorn

from untorch.serve.addresses import BACKLOG, Addresses, ending_signals, port_of
from untorch.serve.app import build_app
from untorch.serve.control import Control
from untorch.serve.http_protocol import limited_protocol
from untorch.serve.options import ServeOptions
from untorch.serve.state import ServerState

__all__ = ["run_process"]

_log = logging.getLogger("untorch.serve")


def run_process(
    options: ServeOptions,
    http: socket.socket,
    *,
    announce: Callable[[Addresses], None] | None = None,
    control: tuple[socket.socket, Mapping[str, bool]] | None = None,
    loads_first: bool = False,
) -> None:
    """Serves in this process, on a socket that listens.

    ``control``: the connection to a supervisor, and what was loaded and unloaded since it began. ``loads_first``: takes
    no connection before all packages are loaded, as other workers do.
    """
    # The engine's thread, and those of runners, get the interpreter back from the event loop sooner than after 5 ms.
    sys.setswitchinterval(5e-4)
    _runner()(_serve(options, http, announce, control, loads_first))


async def _serve(
    options: ServeOptions,
    http: socket.socket,
    announce: Callable[[Addresses], None] | None,
    control: tuple[socket.socket, Mapping[str, bool]] | None,
    loads_first: bool,
) -> None:
    connection = None
    if control is not None:
        connection = await Control.open(control[0])
        connection.changes = dict(control[1])
    await _Process(options, http, announce, connection, loads_first).serve()


def _runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    run_with_uvloop: Callable[[Coroutine[Any, Any, None]], None] = uvloop.run
    return run_with_uvloop


class _Server(uvicorn.Server):
    """uvicorn's server without its own signal handlers, which end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    def __init__(
        self,
        options: ServeOptions,
        http: socket.socket,
        announce: Callable[[Addresses], None] | None,
        control: Control | None,
        loads_first: bool,
    ) -> None:
        self._options = options
        self._loads_first = loads_first
        self._http = http
        self._announce = announce
        self._control = control
        self._state = ServerState(options)
        self._stop = asyncio.Event()
        self._server = _Server(
            uvicorn.Config(
                build_app(options, self._state),
                http=limited_protocol(options),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=max(1, round(options.drain)),
                ssl_certfile=options.tls_certificate,
                ssl_keyfile=options.tls_key,
            )
        )

    async def serve(self) -> None:
        """Listens at once, so that probes are answered while packages are loaded, unless other workers do that."""
        loop, options, state = asyncio.get_running_loop(), self._options, self._state
        for number in ending_signals():
            loop.add_signal_handler(number, self._on_signal)
        port = port_of(self._http)
        tasks = [asyncio.create_task(self._obey(self._control))] if self._control is not None else []
        loading, stopping = asyncio.create_task(self._load()), asyncio.create_task(self._stop.wait())
        if self._loads_first:
            await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        grpc_server = None
        if options.grpc_port is not None:
            from untorch.serve.inference.grpc import GrpcServer

            grpc_server = GrpcServer(state, options.host, options.grpc_port)
            await grpc_server.start()
        addresses = Addresses(options, port, None if grpc_server is None else grpc_server.port)
        serving = asyncio.create_task(self._server.serve(sockets=[self._http]))
        tasks.append(asyncio.create_task(state.keep_up()))
        try:
            await asyncio.wait([loading, stopping, serving], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if loading.done():
                loading.result()
                _log.info("serving %s on %s", ", ".join(sorted(state.repository.models)) or "nothing", addresses.http)
                if self._announce is not None:
                    self._announce(addresses)
                if self._control is not None:
                    await self._control.send({"event": "ready"})
                await asyncio.wait(
                    [asyncio.create_task(self._stop.wait()), serving], return_when=asyncio.FIRST_COMPLETED
                )
        except BaseException as error:
            if self._control is not None:
                await self._control.send({"event": "failed", "error": str(error)})
            raise
        finally:
            state.draining = True
            _log.info("draining, for at most %g s", options.drain)
            self._server.should_exit = True
            await asyncio.gather(
                serving,
                grpc_server.stop(options.drain) if grpc_server is not None else asyncio.sleep(0),
                return_exceptions=True,
            )
            for task in tasks:
                task.cancel()
            await self._close()

    async def _load(self) -> None:
        await self._state.load_all()
        if self._control is not None:
            for name, loaded in list(self._control.changes.items()):
                if loaded != any(package.name == name for package in self._state.repository.packages):
                    await self._state.apply("load" if loaded else "unload", name)

    async def _close(self) -> None:
        """A call that runs for longer than the drain limit does not hold up the end."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._state.close(), max(1.0, min(5.0, self._options.drain)))
            return
        _log.error("calls still run after the drain limit: the process ends without them")
        logging.shutdown()
        os._exit(0)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._server.force_exit = True
        self._stop.set()

    async def _obey(self, control: Control) -> None:
        """Loads and unloads what the supervisor says. Its end is ours."""
        state = self._state
        state.forward_change = control.ask
        async for message in control:
            if "apply" in message:
                error = None
                try:
                    await state.apply(message["action"], message["name"])
                    control.changes[message["name"]] = message["action"] == "load"
                except Exception as failure:
                    error = [type(failure).__name__, str(failure)]
                await control.send({"applied": message["apply"], "error": error})
        self._stop.set()
