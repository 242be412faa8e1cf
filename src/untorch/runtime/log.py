"""The logger "untorch". A process that never imports logging pays nothing: nobody can have asked for records then."""

from __future__ import annotations

import sys

__all__ = ["DEBUG", "INFO", "log"]

DEBUG, INFO = 10, 20  # logging's


def log(level: int, message: str, *arguments: object) -> None:
    """A record of ``logging.getLogger("untorch")``, if the process uses logging."""
    logging = sys.modules.get("logging")
    if logging is None:
        return
    logger = logging.getLogger("untorch")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    logger.log(level, message, *arguments, stacklevel=2)
