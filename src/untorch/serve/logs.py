"""Logs on stderr: lines of text, or a JSON object each."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from datetime import datetime, timezone

from untorch.runtime.text import escape_controls

__all__ = ["JsonFormatter", "set_up_logs"]

# Fields that a record may carry beside its message.
_FIELDS = ("request_id", "method", "path", "status", "seconds", "client")


class JsonFormatter(logging.Formatter):
    """One object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        document |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{self.formatTime(record)} {record.levelname.lower()} {escape_controls(record.getMessage())}"
        if (request_id := getattr(record, "request_id", None)) is not None:
            text += f" ({request_id})"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def set_up_logs(kind: str) -> None:
    """Sends records to stderr; of packages other than untorch and uvicorn, only warnings. "none": only errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else _TextFormatter())
    level = logging.ERROR if kind == "none" else logging.INFO
    for name in ("untorch", "uvicorn", "uvicorn.error", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if "." not in name else []
        logger.setLevel(level if name != "uvicorn.error" else max(level, logging.WARNING))
        logger.propagate = "." in name
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    # A record of ours has more.
    logging.getLogger("uvicorn.access").handlers = []
    logging.getLogger("uvicorn.access").propagate = False
