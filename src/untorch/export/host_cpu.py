"""The CPU that the host code is compiled for: its compiler flags, and the CPU features that the code can need."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from untorch.export.errors import CompileError, OptionError
from untorch.runtime.errors import UnsupportedError

__all__ = ["Cpu", "HostCpu", "compiler_features", "resolve_host_cpu", "resolve_host_cpus"]

Cpu = Literal["portable", "native", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
_PORTABLE: Cpu = "x86-64-v3"

# Predefined macros → feature names of /proc/cpuinfo, all of which the loader knows.
# Listed are the extensions that a compiler uses on its own or through Inductor's vector headers. Cryptography, tiles
# and system instructions appear in no generated code.
_FEATURES = {
    "__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2", "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe", "__LZCNT__": "abm", "__BMI__": "bmi1", "__BMI2__": "bmi2", "__F16C__": "f16c",
    "__AVX__": "avx", "__AVX2__": "avx2", "__FMA__": "fma", "__AVXVNNI__": "avx_vnni", "__GFNI__": "gfni",
    "__AVX512F__": "avx512f", "__AVX512BW__": "avx512bw", "__AVX512CD__": "avx512cd", "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl", "__AVX512VNNI__": "avx512_vnni", "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16", "__AVX512VBMI__": "avx512vbmi", "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512IFMA__": "avx512ifma", "__AVX512BITALG__": "avx512_bitalg", "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
}  # fmt: skip


@dataclass(frozen=True)
class HostCpu:
    """A level of the option ``cpu`` as the compiler has it: -march, vectors in bits (0: scalar, None: torch's)."""

    name: Cpu
    architecture: str
    march: str | None
    vector_bits: int | None


def resolve_host_cpu(name: Cpu) -> HostCpu:
    """The CPU ``name`` on this build machine. Raises UnsupportedError for an x86-64 level elsewhere."""
    architecture = platform.machine()
    if architecture != "x86_64":
        if name not in ("native", "portable"):
            raise UnsupportedError(
                f"option cpu: {name!r} needs an x86-64 build machine, this one is {architecture}: use cpu='portable'"
            )
        return HostCpu(name, architecture, None, None)
    if name == "portable":
        name = _PORTABLE
    if name == "native":
        import torch

        bits = 512 if torch.cpu._is_avx512_supported() else 256 if torch.cpu._is_avx2_supported() else 0
        return HostCpu(name, architecture, "native", bits)
    return HostCpu(name, architecture, name, {"x86-64-v2": 0, "x86-64-v3": 256, "x86-64-v4": 512}[name])


def resolve_host_cpus(names: Cpu | Sequence[Cpu]) -> tuple[HostCpu, ...]:
    """The option ``cpu``, one level or several. Raises UnsupportedError, and OptionError for none or one twice."""
    if isinstance(names, str):
        return (resolve_host_cpu(names),)
    hosts = tuple(resolve_host_cpu(name) for name in names)
    if not hosts:
        raise OptionError("option cpu: expected a level, or a list of them, got an empty one")
    levels = [host.name for host in hosts]
    if len(set(levels)) < len(levels):
        raise OptionError(f"option cpu: a level is there twice: {', '.join(levels)}")
    return hosts


def compiler_features(host: HostCpu, compiler: str) -> list[str]:
    """The CPU features that code compiled for ``host`` may use, under the names that the loader checks."""
    if host.march is None or host.architecture != "x86_64":
        return []
    command = [compiler, f"-march={host.march}", "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise CompileError(f"{' '.join(command)} failed: {detail.strip()}") from error
    macros = {line.split()[1] for line in output.splitlines() if line.startswith("#define ")}
    return [feature for macro, feature in _FEATURES.items() if macro in macros]
