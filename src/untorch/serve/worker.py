"""A worker process: ``python -m untorch.serve.worker HTTP_FD CONTROL_FD``, started by the supervisor."""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import Any

from untorch.runtime.errors import UntorchError
from untorch.serve.logs import set_up_logs
from untorch.serve.options import ServeOptions
from untorch.serve.server import run_process

__all__ = ["main"]


def main(http_fd: int, control_fd: int) -> int:
    """Serves on an inherited socket. The options come over the control socket, not by arguments that all can read."""
    end = socket.socket(fileno=control_fd)
    first = _first_line(end)
    options = ServeOptions.from_json(first["options"])
    set_up_logs(options.log_format)
    http = socket.socket(fileno=http_fd)
    http.setblocking(False)
    try:
        run_process(options, http, control=(end, first["changes"]), loads_first=first["loads_first"])
    except (UntorchError, OSError) as error:
        logging.getLogger("untorch.serve").error("the worker ends: %s", error)
        return 1
    return 0


def _first_line(end: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        part = end.recv(65536)
        if not part:
            raise SystemExit(1)  # the supervisor is gone
        data += part
    document: dict[str, Any] = json.loads(data)
    return document


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
