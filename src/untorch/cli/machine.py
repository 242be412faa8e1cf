"""Describes machine and installation for ``untorch doctor``."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

__all__ = ["cuda_status", "describe_machine", "installed_version", "num_threads"]

_CUDA_LIBRARIES = {
    "driver": ("libcuda.so.1",),
    "cuBLAS": ("libcublas.so.13", "libcublas.so.12"),
    "cuDNN": ("libcudnn.so.9",),
}
# Folders of NVIDIA's wheels below site-packages, as of CUDA 12 and 13.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/cudnn/lib")
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """What ``untorch doctor --json`` prints apart from the checks."""
    import numpy

    import untorch
    from untorch import _core
    from untorch.cli.extras import installed_extras, wheel_tags
    from untorch.cli.process import library_path
    from untorch.runtime.errors import UntorchError

    try:
        library: Path | None = library_path()
    except UntorchError:
        library = None
    return {
        "untorch": untorch.__version__,
        "wheel": wheel_tags(),
        "extras": installed_extras(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "numpy": numpy.__version__,
        "ml_dtypes": installed_version("ml_dtypes"),
        "platform": f"{platform.platform()} ({' '.join(platform.libc_ver()).strip() or 'unknown C library'})",
        "cpu": {
            "model": _cpu_model(),
            "architecture": _core.cpu_architecture(),
            "features": _core.cpu_features().split(),
            "level": _core.cpu_level(),
            "extensions": _core.cpu_extensions().split(),
            "wanted_level": os.environ.get("UNTORCH_ISA"),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "threads": {"number": num_threads(), "environment": os.environ.get("OMP_NUM_THREADS")},
        "library": {
            "path": str(library) if library is not None else None,
            "bytes": library.stat().st_size if library is not None else None,
            "version": _core.version(),
        },
        "torch": installed_version("torch"),
        # Of those without a C function, what the library serves itself.
        "native_operators": {device: _core.native_operators(device) for device in ("cpu", "cuda")},
        "cuda": {
            **cuda_status(),
            "architectures": _architectures(library),
            "libraries": {name: _find_library(names) for name, names in _CUDA_LIBRARIES.items()},
        },
    }


def _architectures(library: Path | None) -> list[str] | None:
    """What the library's CUDA kernels were compiled for; empty: a build without CUDA; None: it cannot be read."""
    from untorch.cli.cuda_code import compiled_architectures

    try:
        return None if library is None else compiled_architectures(library)
    except (OSError, ValueError):
        return None


def cuda_status() -> dict[str, Any]:
    """Whether packages for CUDA run here and if not, why; this build's kernels, the driver and the devices."""
    from untorch import _core
    from untorch.runtime.unsupported import BUILT_WITHOUT_CUDA, has_cuda_kernels

    kernels = has_cuda_kernels(_exported())
    answer = json.loads(_core.cuda_devices())
    devices = answer.get("devices", [])
    version = answer.get("driver")
    if not kernels:
        note = BUILT_WITHOUT_CUDA
    elif "error" in answer:
        note = answer["error"]
    elif not devices:
        note = "the driver reports no GPU: check CUDA_VISIBLE_DEVICES"
    else:
        note = None
    return {
        "served": note is None,
        "note": note,
        "kernels": kernels,
        "driver": None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        "devices": devices,
    }


def _exported() -> frozenset[str]:
    from untorch.cli.process import exported_functions
    from untorch.runtime.errors import UntorchError

    try:
        return exported_functions()
    except UntorchError:
        return frozenset()


def installed_version(package: str) -> str | None:
    """The version in the installed metadata; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def num_threads() -> int | None:
    """Threads of a parallel loop, unless ``load`` is told otherwise; None when libuntorch.so is not found."""
    from untorch.cli.process import library_path
    from untorch.runtime.errors import UntorchError

    try:
        return int(ctypes.CDLL(str(library_path())).utp_get_max_threads())
    except (UntorchError, OSError, AttributeError):
        return None


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return None


def _find_library(names: tuple[str, ...]) -> str | None:
    """A library's path in LD_LIBRARY_PATH or the usual folders. It is not opened: that would start the driver."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for site in sys.path:
        folders += [os.path.join(site, folder) for folder in _WHEEL_FOLDERS]
    for folder in (*folders, *_SYSTEM_FOLDERS):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return path
    return None
