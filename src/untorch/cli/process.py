"""This process's memory and mapped libraries, from Linux's /proc. No typer in here."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["exported_functions", "library_path", "mapped_library", "memory"]


def memory() -> tuple[int | None, int | None]:
    """Resident bytes, now and peak (VmRSS and VmHWM); None without /proc."""
    values: dict[str, int] = {}
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None, None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            values[name] = int(value.split()[0]) * 1024
    return values.get("VmRSS"), values.get("VmHWM")


def mapped_library(name: str) -> str | None:
    """The path of the first library that this process has mapped whose file name starts with ``name``."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].rpartition("/")[2].startswith(name):
            return fields[5]
    return None


def library_path() -> Path:
    """The libuntorch.so that this process uses. Raises UnsupportedError when it cannot be found."""
    if (mapped := mapped_library("libuntorch.so")) is not None and os.path.isfile(mapped):
        return Path(mapped)
    import untorch
    from untorch.runtime.errors import UnsupportedError

    for folder in untorch.__path__:
        if (path := Path(folder) / "libuntorch.so").is_file():
            return path
    raise UnsupportedError("libuntorch.so was not found beside the untorch package: install untorch again")


def exported_functions() -> frozenset[str]:
    """Every function of ``library_path`` that a model library can call, under the name by which it calls it."""
    from untorch.runtime.coverage import interface_functions

    return interface_functions(library_path())
