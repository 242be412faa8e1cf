"""Calls the C shims of libuntorch.so through ctypes, with torch tensors in and out.

Used by the native tests: ``call("aoti_torch_cpu_mm_out", out, a, b)`` passes torch tensors as handles (the memory is
shared, strides and offsets kept), ints, floats, strings, lists of ints (pointer and length) and ``Opt(...)`` for
optional arguments; ``call(..., returns=2)`` appends two output slots and gives back torch tensors.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from dataclasses import dataclass
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]

CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11,
    torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.uint16: 27, torch.uint32: 28,
    torch.uint64: 29,
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


def library_path() -> str:
    """``UNTORCH_LIBRARY``, else the installed package's library, else the newest one under build/."""
    if path := os.environ.get("UNTORCH_LIBRARY"):
        return path
    import importlib.util

    spec = importlib.util.find_spec("untorch")
    if spec is not None and spec.origin is not None:
        candidate = pathlib.Path(spec.origin).with_name("libuntorch.so")
        if candidate.exists():
            return str(candidate)
    built = sorted(ROOT.glob("build/*/native/libuntorch.so"), key=lambda p: p.stat().st_mtime)
    if not built:
        raise RuntimeError("libuntorch.so was not found: install untorch or set UNTORCH_LIBRARY")
    return str(built[-1])


lib = ctypes.CDLL(library_path())
lib.torch_exception_get_what.restype = ctypes.c_char_p
lib.aoti_torch_dtype_element_size.restype = ctypes.c_size_t


class ShimError(RuntimeError):
    """A shim returned a failure; the text is untorch's message."""


@dataclass
class Opt:
    """An optional argument: passed as a pointer to the value, or null for ``Opt(None)``.

    ``kind`` is needed for scalars only: "int64", "int32" or "double".
    """

    value: Any
    kind: str = "tensor"


@dataclass
class F32:
    """A C float argument (a plain Python float is a double)."""

    value: float


@dataclass
class I32:
    """An int32 argument, for example a flag or a dtype code (a plain Python int is an int64)."""

    value: int


@dataclass
class Handles:
    """An array of tensor handles, ``None`` entries as null; the length is not appended."""

    values: list[Any]


@dataclass
class OptHandles:
    """A list of optional tensors: an array of pointers to handles, null for ``None``, then its length."""

    values: list[Any]


def _i64(values: list[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def handle(tensor: torch.Tensor) -> ctypes.c_void_p:
    """A new tensor handle that shares the memory of ``tensor``; free it with ``delete``."""
    out = ctypes.c_void_p()
    storage = tensor.untyped_storage()
    code = lib.aoti_torch_create_tensor_from_blob(
        ctypes.c_void_p(storage.data_ptr()), ctypes.c_int64(tensor.dim()), _i64(list(tensor.shape)),
        _i64(list(tensor.stride())), ctypes.c_int64(tensor.storage_offset()), ctypes.c_int32(CODES[tensor.dtype]),
        *(map(ctypes.c_int32, (1, tensor.device.index) if tensor.is_cuda else (0, -1))), ctypes.byref(out),
    )  # fmt: skip
    raise_on(code)
    return out


class _CallerStream(ctypes.Structure):
    _fields_ = (("stream", ctypes.c_void_p), ("is_set", ctypes.c_int32))


lib.untorch_caller_stream_exchange.restype = _CallerStream
lib.untorch_caller_stream_exchange.argtypes = [_CallerStream]


def use_torch_stream() -> None:
    """CUDA shims that this thread calls run on torch's current stream, in order with torch's own work."""
    lib.untorch_caller_stream_exchange(_CallerStream(torch.cuda.current_stream().cuda_stream, 1))


def delete(h: ctypes.c_void_p) -> None:
    lib.aoti_torch_delete_tensor_object(h)


def raise_on(code: int) -> None:
    if code != 0:
        raise ShimError(lib.torch_exception_get_what().decode())


def to_torch(h: ctypes.c_void_p) -> torch.Tensor:
    """A torch copy of the tensor behind a handle, with its strides where they are dense."""
    dim, dtype, data = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_void_p()
    sizes, strides = ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_int64)()
    raise_on(lib.aoti_torch_get_dim(h, ctypes.byref(dim)))
    raise_on(lib.aoti_torch_get_dtype(h, ctypes.byref(dtype)))
    raise_on(lib.aoti_torch_get_sizes(h, ctypes.byref(sizes)))
    raise_on(lib.aoti_torch_get_strides(h, ctypes.byref(strides)))
    raise_on(lib.aoti_torch_get_data_ptr(h, ctypes.byref(data)))
    shape = [sizes[i] for i in range(dim.value)]
    stride = [strides[i] for i in range(dim.value)]
    torch_dtype = DTYPES[dtype.value]
    device_type, device_index = ctypes.c_int32(), ctypes.c_int32()
    raise_on(lib.aoti_torch_get_device_type(h, ctypes.byref(device_type)))
    raise_on(lib.aoti_torch_get_device_index(h, ctypes.byref(device_index)))
    device = torch.device("cuda", device_index.value) if device_type.value == 1 else torch.device("cpu")
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=torch_dtype, device=device)
    if device.type == "cuda":
        out = torch.empty_strided(shape, stride, dtype=torch_dtype, device=device)
        to = handle(out)
        try:
            raise_on(lib.aoti_torch_copy_(to, h, ctypes.c_int32(0)))
        finally:
            delete(to)
        return out
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    nbytes = extent * lib.aoti_torch_dtype_element_size(dtype)
    raw = bytearray(ctypes.string_at(data, nbytes))
    return torch.frombuffer(raw, dtype=torch_dtype).as_strided(shape, stride).clone()


def call(name: str, *args: Any, returns: int = 0) -> Any:
    """Calls a shim. Gives None, one tensor or a tuple of tensors, after ``returns``."""
    owned: list[ctypes.c_void_p] = []
    keep: list[Any] = []

    def tensor_arg(tensor: torch.Tensor) -> ctypes.c_void_p:
        owned.append(handle(tensor))
        return owned[-1]

    c_args: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            c_args.append(tensor_arg(arg))
        elif arg is None:
            c_args.append(ctypes.c_void_p())
        elif isinstance(arg, Opt):
            if arg.value is None:
                c_args.append(ctypes.c_void_p())
            elif arg.kind == "tensor":
                keep.append(tensor_arg(arg.value))
                c_args.append(ctypes.byref(keep[-1]))
            else:
                kinds = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "double": ctypes.c_double}
                keep.append(kinds[arg.kind](arg.value))
                c_args.append(ctypes.byref(keep[-1]))
        elif isinstance(arg, F32):
            c_args.append(ctypes.c_float(arg.value))
        elif isinstance(arg, I32):
            c_args.append(ctypes.c_int32(arg.value))
        elif isinstance(arg, Handles):
            array = (ctypes.c_void_p * max(len(arg.values), 1))()
            for i, value in enumerate(arg.values):
                array[i] = None if value is None else tensor_arg(value).value
            keep.append(array)
            c_args.append(array)
        elif isinstance(arg, OptHandles):
            pointers = (ctypes.POINTER(ctypes.c_void_p) * max(len(arg.values), 1))()
            for i, value in enumerate(arg.values):
                if value is not None:
                    pointers[i] = ctypes.pointer(tensor_arg(value))
            keep.append(pointers)
            c_args += [pointers, ctypes.c_int64(len(arg.values))]
        elif isinstance(arg, bool):
            c_args.append(ctypes.c_int32(arg))
        elif isinstance(arg, int):
            c_args.append(ctypes.c_int64(arg))
        elif isinstance(arg, float):
            c_args.append(ctypes.c_double(arg))
        elif isinstance(arg, str):
            c_args.append(ctypes.c_char_p(arg.encode()))
        elif isinstance(arg, list | tuple):
            c_args += [_i64(list(arg)), ctypes.c_int64(len(arg))]
        else:
            raise TypeError(f"cannot pass {type(arg).__name__} to a shim")
    slots = [ctypes.c_void_p() for _ in range(returns)]
    c_args += [ctypes.byref(slot) for slot in slots]
    try:
        raise_on(getattr(lib, name)(*c_args))
        out = tuple(to_torch(slot) for slot in slots)
    finally:
        for h in owned:
            delete(h)
        for slot in slots:
            if slot.value:
                delete(slot)
    if returns == 0:
        return None
    return out[0] if returns == 1 else out
