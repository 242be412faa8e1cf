"""What libuntorch.so serves of what a model library calls: C functions, Python kernels, and what is refused and why.

``untorch.export`` adds the model's source lines to it and raises; ``untorch inspect``, ``ops`` and ``doctor`` print it,
also where there is no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from untorch.runtime.elf import ElfFile, name_for_models, read_elf
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import served_by
from untorch.runtime.unsupported import UNSUPPORTED_SHIMS

__all__ = [
    "classify", "describe_function", "describe_kernel", "has_kernel", "interface_functions", "names_for_models",
    "needed_functions", "operator_of",
]  # fmt: skip

_DEVICES = ("cpu", "cuda")
_INTERFACE_PREFIXES = ("aoti_torch_", "aoti_record_function_", "torch_", "cuda", "Sleef_")
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")


def needed_functions(library: ElfFile) -> list[str]:
    """The functions that a model library takes from the runtime: undefined, not weak, and of no system library.

    System libraries version their symbols; libuntorch.so and libtorch do not. NVIDIA's driver does not either: its
    functions are known by their prefix. Those of the CUDA runtime are the runtime's to give.
    """
    driver = "libcuda.so.1" in library.needed
    return sorted(
        {
            symbol.name
            for symbol in library.undefined()
            if not symbol.weak
            and symbol.version_file in (None, "libuntorch.so")
            and not (driver and _DRIVER_FUNCTION.fullmatch(symbol.name))
        }
    )


def names_for_models(exported: Iterable[str]) -> frozenset[str]:
    """The names by which models call the functions that libuntorch.so exports."""
    return frozenset(map(name_for_models, exported))


@lru_cache(maxsize=4)
def interface_functions(library: Path) -> frozenset[str]:
    """Every function of this libuntorch.so that a model library can call, under the name by which it calls it."""
    return frozenset(
        name for name in names_for_models(read_elf(library).exported()) if name.startswith(_INTERFACE_PREFIXES)
    )


def operator_of(function: str, device: str | None = None) -> str | None:
    """The operator behind a C function, of this device if one is given: "aoti_torch_cpu_addmm_out" → "addmm_out"."""
    for name in _DEVICES if device is None else (device,):
        if function.startswith(prefix := f"aoti_torch_{name}_"):
            return function.removeprefix(prefix)
    return None


def has_kernel(target: str, device: str = "cpu") -> bool:
    """Whether a kernel serves the operator ``target`` on the device: a native one, or a Python one."""
    try:
        return served_by(target, device) is not None
    except InvalidArgumentError:  # no operator's name
        return False


def classify(functions: Iterable[str], device: str) -> dict[str, list[str]]:
    """The functions by kind: operators of the device (without prefix), vector math, and the rest of the interface."""
    groups: dict[str, list[str]] = {"operators": [], "vector_functions": [], "interface_functions": []}
    for name in sorted(functions):
        if (operator := operator_of(name, device)) is not None:
            groups["operators"].append(operator)
        elif name.startswith("Sleef_"):
            groups["vector_functions"].append(name)
        elif operator_of(name) is None:
            groups["interface_functions"].append(name)
    return groups


def describe_function(name: str, served: frozenset[str]) -> dict[str, Any]:
    """A function that a model calls, as `untorch inspect --json` has it: whether it is served, and why it is not."""
    entry: dict[str, Any] = {"name": name, "kind": "function", "served": name in served}
    if not entry["served"] and (reason := UNSUPPORTED_SHIMS.get(name)):
        entry["reason"] = reason
    return entry


def describe_kernel(target: str, device: str = "cpu") -> dict[str, Any]:
    """Likewise, an operator without a C function on the device; ``by`` is what serves it."""
    served = has_kernel(target, device)
    entry: dict[str, Any] = {"name": target, "kind": "operator", "served": served, "device": device}
    if served:
        entry["by"] = served_by(target, device)
    else:
        entry["reason"] = f"it has no kernel for {device}: register one with untorch.register_kernel"
    return entry
