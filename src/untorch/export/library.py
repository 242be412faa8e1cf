"""Where libuntorch.so is: beside the installed package, or where UNTORCH_LIBRARY points during development."""

from __future__ import annotations

import os
from pathlib import Path

from untorch.runtime.elf import read_elf
from untorch.runtime.errors import UnsupportedError

__all__ = ["find_runtime_library", "runtime_functions"]


def find_runtime_library() -> Path:
    """The path of libuntorch.so. Raises UnsupportedError when there is none."""
    if value := os.environ.get("UNTORCH_LIBRARY"):
        path = Path(value).resolve()
        if not path.is_file():
            raise UnsupportedError(f"UNTORCH_LIBRARY names {value}, which is not a file: correct or unset it")
        return path
    import untorch

    for folder in untorch.__path__:
        path = Path(folder) / "libuntorch.so"
        if path.is_file():
            return path.resolve()
    raise UnsupportedError(
        "libuntorch.so was not found beside the untorch package: install untorch from a wheel, or set UNTORCH_LIBRARY"
    )


def runtime_functions() -> frozenset[str]:
    """The C functions that a method's library can call: those of libuntorch.so and of the libraries shipped with it."""
    runtime = find_runtime_library()
    library = read_elf(runtime)
    beside = [path for name in library.needed if (path := runtime.with_name(name)).is_file()]
    return library.exported().union(*(read_elf(path).exported() for path in beside))
