"""Arrays whose type has the C functions of DLPack's exchange, made by ctypes; no torch and no package is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

CPU, CUDA = 1, 2
FLOAT, COMPLEX = 2, 5


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    ]  # fmt: skip


class Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p), ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p), ("borrowed_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]  # fmt: skip


Delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
held: list[Any] = []  # what C holds by its address
alive: dict[int, Any] = {}  # what was given and not deleted yet, by its address


def make_type(
    tensor_of: Callable[[Any], Tensor], *, stream: int = 0, major: int = 1, chained: bool = False, fails: bool = False
) -> type[Any]:
    """A type whose arrays are described by ``tensor_of``; ``chained``: its functions lie behind another version's."""

    def delete(address: int) -> None:
        del alive[address]

    deleter = Delete(delete)

    def from_object(given: Any, out: Any) -> int:
        if fails:
            return -1
        made = Managed(major=1, minor=3, deleter=ctypes.cast(deleter, ctypes.c_void_p), tensor=tensor_of(given))
        address = ctypes.addressof(made)
        alive[address] = (made, given)
        out[0] = address
        return 0

    def current_stream(_type: int, _device: int, out: Any) -> int:
        out[0] = stream
        return 0

    functions = FromObject(from_object), CurrentStream(current_stream)
    table = Exchange(major=major, minor=3)
    table.managed_from_object, table.current_stream = (ctypes.cast(f, ctypes.c_void_p) for f in functions)
    first = Exchange(major=7, previous=ctypes.addressof(table)) if chained else table
    name = ctypes.c_char_p(b"dlpack_exchange_api")
    held.append((deleter, functions, table, first, name))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return type("Given", (), {"__dlpack_c_exchange_api__": new(ctypes.addressof(first), name, None)})


def describe(data: int, shape: tuple[int, ...], bits: int, device_type: int = CPU, code: int = FLOAT) -> Tensor:
    """A row-major array."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    held.append(sizes)
    tensor = Tensor(data=data, device_type=device_type, ndim=len(shape), code=code, bits=bits, lanes=1)
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    return tensor


def of_numpy(given: Any) -> Tensor:
    """Of an object whose ``values`` are a numpy array."""
    values: np.ndarray[Any, Any] = given.values
    code = COMPLEX if values.dtype.kind == "c" else FLOAT
    return describe(values.ctypes.data, values.shape, 8 * values.itemsize, code=code)
