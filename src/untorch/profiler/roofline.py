"""The roofline of this machine: its read bandwidth and its GEMM rate, measured with the library's own kernels.

S. Williams, A. Waterman, D. Patterson: Roofline: An Insightful Visual Performance Model. CACM 52(4), 2009.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untorch import _core
from untorch.runtime.errors import UnsupportedError

__all__ = ["Roofline", "measure_roofline"]

_FLOAT32, _BFLOAT16 = 6, 15  # PyTorch's codes
_CPU, _CUDA = 0, 1
_READ_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_CPU_SIZE, _CUDA_SIZE = 1024, 8192
_REPEATS = 5


@dataclass(frozen=True)
class Roofline:
    """bytes_per_second: of reads, on a GPU of copies (read and written). operations_per_second: of a GEMM in ``dtype``,
    two an element of its sum.
    """

    bytes_per_second: float
    operations_per_second: float
    dtype: str

    def least_seconds(self, nbytes: int | None, operations: int | None) -> float | None:
        """The shortest time for the work: that of the memory or of the arithmetic, whichever is longer."""
        times = [
            amount / rate
            for amount, rate in ((nbytes, self.bytes_per_second), (operations, self.operations_per_second))
            if amount is not None
        ]
        return max(times) if times and max(times) > 0 else None


def measure_roofline(device: str = "cpu", num_threads: int = 0) -> Roofline:
    """Measures a device, for about a second. num_threads: of the CPU; 0: as many as a call has.

    Raises UnsupportedError where libuntorch.so has no GEMM for the device.
    """
    library = _library()
    if device == "cpu":
        threads = num_threads or int(library.utp_get_max_threads())
        rate = _core.read_rate(max(_READ_BYTES // threads, 64 << 20), threads)

        def measure() -> float:
            library.utp_set_num_threads(threads)  # of the thread that asks
            return _gemm_rate(library, "cpu", _CPU_SIZE, 0)

        with ThreadPoolExecutor(1) as pool:
            return Roofline(rate, pool.submit(measure).result(), "float32")
    index = int(device.partition(":")[2] or 0)
    return Roofline(_copy_rate(index), _gemm_rate(library, "cuda", _CUDA_SIZE, index), "bfloat16")


def _library() -> ctypes.CDLL:
    """The libuntorch.so of this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    path = next((path for path in paths if path.rpartition("/")[2].startswith("libuntorch.so")), None)
    return ctypes.CDLL(path or str(Path(_core.__file__).parent / "libuntorch.so"))


def _gemm_rate(library: ctypes.CDLL, kind: str, size: int, index: int) -> float:
    """Operations a second of [size, size] by [size, size]: the best of a few repeats."""
    function = f"aoti_torch_{kind}_mm_out"
    if not _core.has_symbol(function):
        raise UnsupportedError(f"the roofline of {kind}: libuntorch.so has no {function}")
    on_gpu = kind == "cuda"
    # int16 for bfloat16, which __cuda_array_interface__ does not know.
    matrices: list[Any] = [
        _core.create("int16" if on_gpu else "float32", (size, size), index if on_gpu else None, True) for _ in range(3)
    ]
    handles = [ctypes.c_void_p() for _ in matrices]
    try:
        for matrix, handle in zip(matrices, handles, strict=True):
            address = matrix.__cuda_array_interface__["data"][0] if on_gpu else matrix.numpy().ctypes.data
            pair = ctypes.c_int64 * 2
            library.aoti_torch_create_tensor_from_blob(
                ctypes.c_void_p(address), ctypes.c_int64(2), pair(size, size), pair(size, 1), ctypes.c_int64(0),
                ctypes.c_int32(_BFLOAT16 if on_gpu else _FLOAT32), ctypes.c_int32(_CUDA if on_gpu else _CPU),
                ctypes.c_int32(index), ctypes.byref(handle),
            )  # fmt: skip

        def multiply() -> None:
            if getattr(library, function)(*handles) != 0:
                raise UnsupportedError(f"the roofline of {kind}: {function} failed")

        return 2.0 * size**3 / _best_seconds(multiply, index if on_gpu else None)
    finally:
        for handle in handles:
            if handle:
                library.aoti_torch_delete_tensor_object(handle)


def _copy_rate(index: int) -> float:
    """Bytes a second of a copy on the GPU, read and written."""
    source = _core.create("uint8", (_COPY_BYTES,), index, True)
    target = _core.create("uint8", (_COPY_BYTES,), index, True)

    def copy() -> None:
        target.assign(source, index)

    return 2.0 * _COPY_BYTES / _best_seconds(copy, index)


def _best_seconds(call: Any, index: int | None) -> float:
    """The shortest of a few calls; the first warms up. index: the GPU that is waited for."""

    def wait() -> None:
        if index is not None:
            _core.synchronize(index, _core.call_stream(index))

    times = []
    for _ in range(1 + _REPEATS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])
