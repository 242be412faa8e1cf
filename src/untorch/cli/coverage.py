"""What libuntorch.so serves: the functions that it exports, the Python kernels, and what is refused and why."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from untorch.runtime.elf import ElfFile, name_for_models, read_elf
from untorch.runtime.errors import UnsupportedError

__all__ = [
    "classify", "exported_functions", "has_kernel", "library_path", "needed_functions", "operator_of", "refused",
    "served",
]  # fmt: skip

_SHIM_PREFIXES = ("aoti_torch_", "aoti_record_function_", "torch_", "cuda")
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")


def library_path() -> Path:
    """The libuntorch.so that this process uses. Raises UnsupportedError when it cannot be found."""
    from untorch.cli.process import mapped_library

    if (mapped := mapped_library("libuntorch.so")) is not None and os.path.isfile(mapped):
        return Path(mapped)
    import untorch

    for folder in untorch.__path__:
        if (path := Path(folder) / "libuntorch.so").is_file():
            return path
    raise UnsupportedError("libuntorch.so was not found beside the untorch package: install untorch again")


@lru_cache(maxsize=1)
def exported_functions() -> frozenset[str]:
    """Every function of libuntorch.so that a model library can call, under the name by which it calls it."""
    names = map(name_for_models, read_elf(library_path()).exported())
    return frozenset(name for name in names if name.startswith((*_SHIM_PREFIXES, "Sleef_", "cuda")))


def needed_functions(library: ElfFile) -> list[str]:
    """What a model library takes from the runtime: undefined, not weak, and of no system library or driver."""
    names = {s.name for s in library.undefined() if not s.weak and s.version_file in (None, "libuntorch.so")}
    driver = "libcuda.so.1" in library.needed
    return sorted(name for name in names if not (driver and _DRIVER_FUNCTION.fullmatch(name)))


def operator_of(function: str, device: str = "cpu") -> str | None:
    """The operator behind a device's C function: "aoti_torch_cpu_addmm_out" → "addmm_out"; None for others."""
    prefix = f"aoti_torch_{device}_"
    return function.removeprefix(prefix) if function.startswith(prefix) else None


def classify(functions: Iterable[str], device: str) -> dict[str, list[str]]:
    """The functions by kind: operators of the device (without prefix), vector math, and the rest of the interface."""
    groups: dict[str, list[str]] = {"operators": [], "vector_functions": [], "interface_functions": []}
    for name in sorted(functions):
        if (operator := operator_of(name, device)) is not None:
            groups["operators"].append(operator)
        elif name.startswith("Sleef_"):
            groups["vector_functions"].append(name)
        elif not name.startswith(("aoti_torch_cuda_", "aoti_torch_cpu_")):
            groups["interface_functions"].append(name)
    return groups


def has_kernel(target: str) -> bool:
    """Whether a Python kernel serves the operator ``target``."""
    from untorch.runtime.registry import find_kernel

    try:
        find_kernel(target)
    except UnsupportedError:
        return False
    return True


def refused() -> dict[str, str]:
    """C functions that PyTorch's headers declare and untorch leaves out, each with the reason."""
    from untorch.runtime.unsupported import UNSUPPORTED_SHIMS

    return dict(UNSUPPORTED_SHIMS)


def served(function: str) -> dict[str, Any]:
    """One entry of a report on a needed function: whether it is there, and if it is refused, why."""
    entry: dict[str, Any] = {"name": function, "kind": "function", "served": function in exported_functions()}
    if not entry["served"] and (reason := refused().get(function)):
        entry["reason"] = reason
    return entry
