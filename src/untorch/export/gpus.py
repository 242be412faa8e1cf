"""NVIDIA GPUs by their data sheets: what cross-compilation has to know of its target."""

from __future__ import annotations

import re
from dataclasses import dataclass

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["GPUS", "LATENCY", "GpuModel", "find_gpu"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_MAX_CTAS = 32  # of an SM
_SHARE_OF_ONE = 1.5  # of the memory bandwidth, times SMs, that one can use
LATENCY = 7e-7  # seconds of a load from device memory, under load


@dataclass(frozen=True)
class GpuModel:
    """One model, from NVIDIA's data sheets and the table of compute capabilities in the CUDA programming guide.

    sms: its SMs. shared_memory: the most bytes of a CTA. l2, memory: bytes. bandwidth: of the memory, GB/s.
    matrix_rate: dense bfloat16 GEMMs that accumulate in float32, TFLOP/s. threads, registers: of an SM.
    """

    name: str
    architecture: str
    sms: int
    shared_memory: int
    l2: int
    memory: int
    bandwidth: float
    matrix_rate: float
    threads: int = 1536
    registers: int = 65536

    @property
    def capability(self) -> tuple[int, int]:
        """(9, 0) for sm_90."""
        number = int(self.architecture.removeprefix("sm_"))
        return number // 10, number % 10

    def resident_ctas(self, warps: int, registers: int, shared_memory: int) -> int:
        """Occupancy: CTAs that an SM runs at once. registers: of a thread; shared_memory: bytes of a CTA."""
        return min(
            self.threads // (32 * warps),
            self.registers // (32 * warps * -(-max(registers, 16) // 8) * 8),
            (self.shared_memory + 1024) // (shared_memory + 1024),
            _MAX_CTAS,
        )

    def bandwidth_for(self, ctas: int) -> float:
        """Bytes a second of the memory bandwidth that so many CTAs reach, each on an SM of its own."""
        return self.bandwidth * 1e9 * min(ctas / self.sms * _SHARE_OF_ONE, 1.0)


# The first of an architecture stands for it.
GPUS = tuple(
    GpuModel(*entry)
    for entry in (
        ("A100", "sm_80", 108, 163 * _KIB, 40 * _MIB, 80 * _GIB, 2039, 312, 2048),
        ("A10", "sm_86", 72, 99 * _KIB, 6 * _MIB, 24 * _GIB, 600, 125),
        ("L40S", "sm_89", 142, 99 * _KIB, 96 * _MIB, 48 * _GIB, 864, 362),
        ("L4", "sm_89", 58, 99 * _KIB, 48 * _MIB, 24 * _GIB, 300, 121),
        ("RTX 4090", "sm_89", 128, 99 * _KIB, 72 * _MIB, 24 * _GIB, 1008, 165),
        ("H100", "sm_90", 132, 227 * _KIB, 50 * _MIB, 80 * _GIB, 3350, 989, 2048),
        ("H200", "sm_90", 132, 227 * _KIB, 50 * _MIB, 141 * _GIB, 4800, 989, 2048),
        ("B200", "sm_100", 148, 227 * _KIB, 126 * _MIB, 180 * _GIB, 8000, 2250, 2048),
        ("RTX 5090", "sm_120", 170, 99 * _KIB, 96 * _MIB, 32 * _GIB, 1792, 209),
    )
)


def find_gpu(name: object) -> GpuModel:
    """The GPU of that name ("H200"), or the one that stands for an architecture ("sm_90").

    Raises InvalidArgumentError with the known ones.
    """
    if isinstance(name, str):
        wanted = re.sub(r"[\s_-]+", "", name).lower()
        for gpu in GPUS:
            if wanted in (re.sub(r"\s+", "", gpu.name).lower(), gpu.architecture.replace("_", "")):
                return gpu
    architectures = ", ".join(dict.fromkeys(gpu.architecture for gpu in GPUS))
    raise InvalidArgumentError(
        f"export: arch: expected one of {architectures}, or the name of a GPU: {', '.join(gpu.name for gpu in GPUS)}; "
        f"got {name!r}"
    )
