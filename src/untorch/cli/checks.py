"""The checks of ``untorch doctor``: each tries one thing that loading and running a model needs."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable

__all__ = ["run_checks"]

_DTYPE_FLOAT32 = 6


def run_checks() -> list[dict[str, str]]:
    """Name, status ("ok", "warning" or "failed") and detail of every check. No check raises."""
    checks: list[tuple[str, Callable[[], tuple[str, str]]]] = [
        ("versions", _versions),
        ("native library", _library),
        ("threads", _threads),
        ("memfd", _memfd),
        ("kernels", _kernels),
        ("half types", _half_types),
        ("temporary folder", _temporary_folder),
    ]
    results = []
    for name, check in checks:
        try:
            status, detail = check()
        except Exception as error:
            status, detail = "failed", f"{type(error).__name__}: {error}"
        results.append({"name": name, "status": status, "detail": detail})
    return results


def _versions() -> tuple[str, str]:
    import untorch
    from untorch import _core

    if _core.version() == untorch.__version__:
        return "ok", f"package and native library are both {untorch.__version__}"
    return "failed", (
        f"the package is {untorch.__version__} and its native library {_core.version()}: two installations are mixed, "
        "install untorch again"
    )


def _library() -> tuple[str, str]:
    from untorch.cli.process import exported_functions, library_path

    count = sum(name.startswith("aoti_torch_cpu_") for name in exported_functions())
    return ("ok" if count else "failed"), f"{library_path().name} exports {count} operators for the CPU"


def _threads() -> tuple[str, str]:
    """The thread pool behind parallel loops; threads are started by the first one."""
    from untorch.cli.machine import num_threads

    number = num_threads()
    if number is None:
        return "failed", "libuntorch.so does not tell its number of threads: install untorch again"
    return "ok", f"parallel loops run on {number} thread{'s' if number != 1 else ''}"


def _memfd() -> tuple[str, str]:
    """Model libraries are opened from memory, through /proc/self/fd."""
    if not hasattr(os, "memfd_create"):
        return "failed", "this Python has no os.memfd_create: Linux 3.17 and glibc 2.27 are the oldest that work"
    descriptor = os.memfd_create("untorch-doctor")
    try:
        os.write(descriptor, b"x")
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:
            right = file.read() == b"x"
    finally:
        os.close(descriptor)
    return ("ok", "files in memory can be made and opened") if right else ("failed", "/proc/self/fd gives other bytes")


def _kernels() -> tuple[str, str]:
    """A GEMM through the C functions that models call, compared with numpy."""
    import numpy

    from untorch import _core
    from untorch.cli.process import library_path

    library = ctypes.CDLL(str(library_path()))
    function = "aoti_torch_cpu_mm_out"
    if not _core.has_symbol(function):
        return "failed", f"the native library has no {function}"
    generator = numpy.random.default_rng(0)
    left, right = (generator.standard_normal(shape).astype(numpy.float32) for shape in ((33, 65), (65, 47)))
    out = numpy.zeros((33, 47), numpy.float32)
    handles: list[ctypes.c_void_p] = []
    try:
        for array in (out, left, right):
            handle = ctypes.c_void_p()
            pair = ctypes.c_int64 * 2
            _succeed(
                library.aoti_torch_create_tensor_from_blob(
                    ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(2), pair(*array.shape),
                    pair(array.shape[1], 1), ctypes.c_int64(0), ctypes.c_int32(_DTYPE_FLOAT32), ctypes.c_int32(0),
                    ctypes.c_int32(0), ctypes.byref(handle),
                ),
                "aoti_torch_create_tensor_from_blob",
            )  # fmt: skip
            handles.append(handle)
        _succeed(getattr(library, function)(*handles), function)
    finally:
        for handle in handles:
            library.aoti_torch_delete_tensor_object(handle)
    difference = float(numpy.abs(out - left @ right).max())
    level = _core.cpu_level()
    if difference > 1e-3:
        return "failed", f"a GEMM with the {level} kernels differs by {difference:.3g} from numpy's"
    return "ok", f"a GEMM with the {level} kernels agrees with numpy's to {difference:.1g}"


def _succeed(status: int, function: str) -> None:
    from untorch.runtime.errors import ModelError

    if status != 0:
        raise ModelError(f"{function} failed with status {status}")


def _half_types() -> tuple[str, str]:
    from untorch.cli.machine import installed_version

    if installed_version("ml_dtypes") is None:
        return "warning", "ml_dtypes is not installed: bfloat16 and float8 arrays need it (pip install 'untorch[bf16]')"
    return "ok", "ml_dtypes gives numpy bfloat16 and float8"


def _temporary_folder() -> tuple[str, str]:
    """The runtime writes no files; only untorch export does."""
    try:
        with tempfile.NamedTemporaryFile() as file:
            return "ok", f"{os.path.dirname(file.name)} can be written (only untorch export needs it)"
    except OSError as error:
        return "warning", f"no temporary file can be made ({error.strerror}); only untorch export needs one"
