"""CPU targets: the compiler flags of each, and the CPU features that the compiled library can then need."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass

from untorch.export.errors import CompileError
from untorch.export.options import Cpu
from untorch.runtime.errors import UnsupportedError

__all__ = ["CpuTarget", "compiler_features", "resolve_cpu"]

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
class CpuTarget:
    """What a target means for the compiler: -march and the vector width in bits (0: scalar, None: torch decides)."""

    name: Cpu
    architecture: str
    march: str | None
    vector_bits: int | None


def resolve_cpu(name: Cpu) -> CpuTarget:
    """The target ``name`` on this build machine. Raises UnsupportedError for an x86-64 level elsewhere."""
    architecture = platform.machine()
    if architecture != "x86_64":
        if name != "native":
            raise UnsupportedError(
                f"option cpu: {name!r} needs an x86-64 build machine, this one is {architecture}: use cpu='native'"
            )
        return CpuTarget(name, architecture, None, None)
    if name == "native":
        import torch

        bits = 512 if torch.cpu._is_avx512_supported() else 256 if torch.cpu._is_avx2_supported() else 0
        return CpuTarget(name, architecture, "native", bits)
    return CpuTarget(name, architecture, name, {"x86-64-v2": 0, "x86-64-v3": 256, "x86-64-v4": 512}[name])


def compiler_features(target: CpuTarget, compiler: str) -> list[str]:
    """The CPU features that code compiled for ``target`` may use, under the names that the loader checks."""
    if target.march is None or target.architecture != "x86_64":
        return []
    command = [compiler, f"-march={target.march}", "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise CompileError(f"{' '.join(command)} failed: {detail.strip()}") from error
    macros = {line.split()[1] for line in output.splitlines() if line.startswith("#define ")}
    return [feature for macro, feature in _FEATURES.items() if macro in macros]
