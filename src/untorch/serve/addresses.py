"""Where a server listens, and by which signals it ends."""

from __future__ import annotations

import os
import signal
import socket

from untorch.runtime.errors import SystemResourceError
from untorch.serve.options import ServeOptions
from untorch.serve.unix_socket import listen_on_path

__all__ = ["BACKLOG", "Addresses", "bind", "ending_signals", "port_of"]

BACKLOG = 2048


class Addresses:
    """Where a server listens.

    Args:
        options: Of the server.
        port: That HTTP got; of no meaning with a Unix socket.
        grpc_port: That gRPC got.
    """

    def __init__(self, options: ServeOptions, port: int, grpc_port: int | None) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        scheme = "https" if options.tls_certificate is not None else "http"
        self.http = f"{scheme}://{host}:{port}" if options.uds is None else f"unix:{os.path.abspath(options.uds)}"
        self.grpc = None if grpc_port is None else f"{host}:{grpc_port}"

    def to_json(self) -> dict[str, str | None]:
        """For ``--json``."""
        return {"http": self.http, "grpc": self.grpc}


def bind(options: ServeOptions) -> socket.socket:
    """A socket that listens for HTTP. Raises SystemResourceError."""
    if options.uds is not None:
        return listen_on_path(options.uds, BACKLOG)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    http = socket.socket(family, socket.SOCK_STREAM)
    try:
        http.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        http.bind((options.host, options.port))
        http.listen(BACKLOG)
        http.setblocking(False)
    except OSError as error:
        http.close()
        raise SystemResourceError(
            f"HTTP cannot listen on {options.host}:{options.port}: {error.strerror or error}", error.errno
        ) from None
    return http


def port_of(http: socket.socket) -> int:
    """That it got; 0 of a Unix socket."""
    return 0 if http.family == socket.AF_UNIX else int(http.getsockname()[1])


def ending_signals() -> list[signal.Signals]:
    """Those after which a server drains and ends. That of a terminal that is closed is not one under nohup."""
    found = [signal.SIGTERM, signal.SIGINT]
    return found if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*found, signal.SIGHUP]
