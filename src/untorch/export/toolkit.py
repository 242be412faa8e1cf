"""What compiling for CUDA needs of the build machine: the toolkit's headers, a libcuda.so to link, Triton, ptxas."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from untorch.export.errors import CompileError
from untorch.runtime.errors import UnsupportedError

__all__ = ["cuda_home", "driver_library", "ptxas_version", "require_triton", "stub_driver"]

_HEADER = Path("include") / "cuda_runtime.h"
# What generated code calls; without any, some linkers leave the library out.
_DRIVER_FUNCTIONS = ("cuLaunchKernel", "cuLaunchKernelEx", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload",
    "cuDriverGetVersion", "cuFuncSetAttribute", "cuGetErrorString", "cuTensorMapEncodeTiled")  # fmt: skip


def require_triton() -> None:
    """Raises UnsupportedError where Triton, or torch's version of it, is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "export: arch: kernels for a cross-compilation target are compiled by Triton, which is not installed: "
            "install the triton that belongs to this torch (3.6 for torch 2.11 to 2.13)"
        ) from error


def ptxas_version(architecture: str) -> str | None:
    """The version of the assembler that Triton has for an architecture, "12.8"; None where it does not tell."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        text = get_ptxas_version(int(architecture.removeprefix("sm_")))
    except Exception:  # Triton's own interface, for a line that people read
        return None
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def cuda_home() -> Path:
    """The folder of the CUDA toolkit, whose headers the generated code includes."""
    from torch.utils import cpp_extension

    nvcc = shutil.which("nvcc")
    candidates = [
        cpp_extension.CUDA_HOME, nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda", *_wheels(),
    ]  # fmt: skip
    for candidate in candidates:
        if candidate and (Path(candidate) / _HEADER).is_file():
            return Path(candidate)
    tried = ", ".join(dict.fromkeys(str(c) for c in candidates if c))
    raise UnsupportedError(
        f"export: compiling for CUDA needs the toolkit's headers, and no {_HEADER} was found below {tried}: install "
        f"the CUDA toolkit{f' {torch.version.cuda}' if torch.version.cuda else ''} or NVIDIA's wheel of its runtime "
        f"(nvidia-cuda-runtime, nvidia-cuda-crt), or set CUDA_HOME"
    )


def _wheels() -> list[Path]:
    """Where NVIDIA's wheels have their headers, beside those of CUDA 13 and newer."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [home for folder in folders for home in sorted(Path(folder).glob("cu[0-9]*"), reverse=True)]


def driver_library() -> Path:
    """A libcuda.so to link with: the driver that this process has open, or the toolkit's stub.

    The linker wants a file of that name; many machines have only the driver's libcuda.so.1.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            opened = line.rstrip("\n").split(None, 5)[-1]
            if os.path.basename(opened).startswith("libcuda.so") and os.path.isfile(opened):
                return Path(opened)
    home = cuda_home()
    for folder in ("lib64/stubs", "lib/stubs", "targets/x86_64-linux/lib/stubs", "targets/sbsa-linux/lib/stubs"):
        if (path := home / folder / "libcuda.so").is_file():
            return path
    raise UnsupportedError("export: compiling for CUDA links libcuda.so, and neither the driver nor a stub was found")


def stub_driver(path: Path, compiler: str) -> None:
    """Writes a libcuda.so to link with; the machine that runs the file has the real one."""
    source = "".join(f"int {name}(void) {{ return 999; }}\n" for name in _DRIVER_FUNCTIONS)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(path)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed: {done.stderr.strip()}")
