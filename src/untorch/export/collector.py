"""Python's garbage collector while a model is traced and compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["rare_collections"]

_THRESHOLDS = (20_000, 10, 50)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collections are rarer meanwhile, those of old objects by far.

    Graphs are hundreds of thousands of objects, which live as long as the export: with Python's own thresholds a tenth
    of the time goes into looking through them again. A collector that is off, or rarer, stays as it is.
    """
    before = gc.get_threshold()
    if before[0] > 0:
        gc.set_threshold(*map(max, before, _THRESHOLDS))
    try:
        yield
    finally:
        gc.set_threshold(*before)
