"""What methods are compiled for: one class a file, and ``resolve_targets`` for export()'s ``device`` and ``arch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from untorch.export.host_cpu import HostCpu, resolve_host_cpu
from untorch.export.target.base import InductorRun, Produced, Target
from untorch.export.target.cpu import CpuTarget
from untorch.export.target.cross_compile import CrossCompileTarget
from untorch.export.target.cuda import CudaTarget
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "TARGETS", "CpuTarget", "CrossCompileTarget", "CudaTarget", "InductorRun", "Produced", "Target", "resolve_targets",
]  # fmt: skip

TARGETS: tuple[type[Target], ...] = (CpuTarget, CrossCompileTarget, CudaTarget)


def resolve_targets(device: object, arch: Any = None, host: HostCpu | None = None) -> tuple[Target, ...]:
    """What export()'s ``device`` and ``arch``, one or several, mean here, with host code for ``host``.

    Raises UnsupportedError or InvalidArgumentError if this machine cannot compile for them.
    """
    host = host or resolve_host_cpu("native")
    if isinstance(arch, str) or not isinstance(arch, Sequence):
        return (_resolve(device, arch, host),)
    if not arch:
        raise InvalidArgumentError("export: arch: expected the name of a GPU, or a list of them, got an empty one")
    targets = tuple(_resolve(device, name, host) for name in arch)
    architectures = [target.architecture for target in targets]
    for architecture in architectures:
        if architectures.count(architecture) > 1:
            names = [name for name, found in zip(arch, architectures, strict=True) if found == architecture]
            raise InvalidArgumentError(
                f"export: arch: {' and '.join(map(repr, names))} are both {architecture}: a file has one code for it"
            )
    return targets


def _resolve(device: object, arch: object, host: HostCpu) -> Target:
    for kind in TARGETS:
        if (target := kind.resolve(device, arch, host)) is not None:
            return target
    raise UnsupportedError(f"export: device: expected 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")
