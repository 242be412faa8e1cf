"""torch's log of an export: kept off the terminal, and read for what torch.export assumes about sizes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import traceback
from collections.abc import Iterator

from untorch.export.explain import Frame, is_model_code

__all__ = ["quiet_logs", "recorded_guards"]

_SIZES = "torch.fx.experimental.symbolic_shapes"
# They log what the error says, some with a stack of torch's.
_NOISY = (_SIZES, "torch._subclasses.fake_tensor", "torch._export.non_strict_utils", "torch.export._trace")
# It warns of operators that libtorch has no C function for. What the runtime lacks is an error of the exporter's.
_FALLBACKS, _NO_C_FUNCTION = "torch._inductor.ir", "is missing a c-shim implementation"
_GUARD = re.compile(r"eval (.+?) \[guard added\]")


class _Recorder(logging.Filter):
    """Sees a record while the code that caused it runs, so the stack has the model's line."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if (match := _GUARD.match(record.getMessage())) and "suppressed" not in match[1]:
            stack = (Frame(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_stack()))
            frame = next(filter(is_model_code, stack), None)
            if frame is not None:
                self.guards.append(f"{match[1]} at {frame}")
        return record.levelno >= logging.WARNING


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """torch logs nothing about what it traces and compiles, unless TORCH_LOGS asks for it."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return

    def refuse(record: logging.LogRecord) -> bool:
        return record.name == _FALLBACKS and _NO_C_FUNCTION not in record.getMessage()

    loggers = [logging.getLogger(name) for name in (*_NOISY, _FALLBACKS)]
    for logger in loggers:
        logger.addFilter(refuse)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(refuse)


@contextlib.contextmanager
def recorded_guards() -> Iterator[list[str]]:
    """The guards of what is traced meanwhile: "Eq(s77, 5) at model.py:14, in forward: return x + self.table"."""
    logger, recorder = logging.getLogger(_SIZES), _Recorder()
    level = logger.level
    logger.addFilter(recorder)
    logger.setLevel(logging.INFO)
    try:
        yield recorder.guards
    finally:
        logger.setLevel(level)
        logger.removeFilter(recorder)
