"""What belongs to the process: numpy's import in the background, programs to load once, and locks after a fork."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import weakref
from typing import Any, ClassVar

__all__ = ["Lock", "Shared", "file_identity", "import_numpy"]

_importing: threading.Thread | None = None


def import_numpy() -> None:
    """Import numpy in the background, since that takes as long as starting a GPU and loading weights. The first call
    needs it and waits for the import.
    """
    global _importing
    if "numpy" in sys.modules or _importing is not None:
        return

    def run() -> None:
        with contextlib.suppress(ImportError):  # the first call raises it
            importlib.import_module("numpy")

    _importing = threading.Thread(target=run, name="untorch-numpy")
    _importing.start()


def _finish_import() -> None:
    # In a forked child the thread does not exist, and the module's import lock would stay taken.
    if _importing is not None and _importing is not threading.current_thread():
        _importing.join()


class Lock:
    """A lock that is free in a forked child: its sections leave their data valid at each step."""

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @classmethod
    def renew_all(cls) -> None:
        """In a forked child."""
        for lock in list(cls._all):
            lock._lock = threading.RLock()


class Shared:
    """Objects by a key, each as long as somebody has it. The last ``kept`` that were given to ``keep`` have it here."""

    def __init__(self, kept: int) -> None:
        self._objects: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._kept: list[Any] = []
        self._most = kept
        self.lock = Lock()

    def get(self, key: Any) -> Any:
        """The object; None if there is none."""
        return self._objects.get(key)

    def add(self, key: Any, value: Any) -> None:
        """Unless there is one that is in use."""
        self._objects.setdefault(key, value)

    def keep(self, value: Any) -> None:
        """Until others were."""
        self._kept = [value, *(other for other in self._kept if other is not value)][: self._most]

    def remove(self, value: Any) -> None:
        """Under whatever key it is."""
        self._kept = [other for other in self._kept if other is not value]
        for key in [key for key, other in list(self._objects.items()) if other is value]:
            self._objects.pop(key, None)


def file_identity(path: str) -> tuple[int, ...] | None:
    """Tells a file from others, and from what it is after a change; None if it cannot be looked at."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


os.register_at_fork(before=_finish_import, after_in_child=Lock.renew_all)
