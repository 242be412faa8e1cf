"""Which levels of instructions have kernels that this CPU can run and does not take by itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.native.shim import lib

LEVELS = ("baseline", "v3", "v4")
# As UNTORCH_ISA has them; "-vnni" keeps the level's VNNI, "-bf16" AVX512_BF16, too. AMX is there without it alone.
NAMES = ("baseline", "v3", "v3-vnni", "v4", "v4-vnni", "v4-bf16")
_VNNI = {"v3": "avx_vnni", "v4": "avx512_vnni"}


def is_another(name: str, own: str, flags: set[str]) -> bool:
    """Whether UNTORCH_ISA of this name changes kernels on a CPU of the level ``own`` with these flags of Linux's."""
    level, _, suffix = name.partition("-")
    if LEVELS.index(level) > LEVELS.index(own) or (suffix and _VNNI[level] not in flags):
        return False  # the CPU's own level, or the same level without the suffix
    has_bf16, has_amx = own == "v4" and "avx512_bf16" in flags, "amx_bf16" in flags
    if suffix == "bf16":
        return has_bf16 and has_amx
    return level != own or has_bf16 or has_amx or (not suffix and _VNNI.get(own) in flags)


def skip_if_own(name: str) -> None:
    """Skips a test for kernels that this CPU does not have, or takes anyway."""
    lib.untorch_cpu_level.restype = ctypes.c_char_p
    own = lib.untorch_cpu_level().decode()
    cpu = Path("/proc/cpuinfo").read_text()
    flags = {flag for line in cpu.splitlines() if line.startswith("flags") for flag in line.split()}
    if not is_another(name, own, flags):
        pytest.skip(f"this CPU has no {name}, or takes it for the other tests: its level is {own}")
