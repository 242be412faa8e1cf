"""Runs a server: in this process, or in several workers."""

from __future__ import annotations

from collections.abc import Callable

from untorch.serve.addresses import Addresses, bind
from untorch.serve.logs import set_up_logs
from untorch.serve.options import ServeOptions
from untorch.serve.server import run_process
from untorch.serve.supervisor import supervise

__all__ = ["run"]


def run(options: ServeOptions, announce: Callable[[Addresses], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, and returns when everything is drained.

    Args:
        options: What to serve, where, and the limits.
        announce: Called once, when the packages are loaded.

    Raises:
        SystemResourceError: A port is taken.
        UntorchError: A package that the options name cannot be loaded.
    """
    set_up_logs(options.log_format)
    if options.workers > 1:
        supervise(options, announce)
        return
    with bind(options) as http:
        run_process(options, http, announce=announce)
