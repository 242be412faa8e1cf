"""CUDA tensors with invalid addresses: enough to test what a shim checks before it calls the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on


class MadeUp(torch.Tensor):
    """A CPU tensor whose handle says cuda:0."""

    is_cuda = True
    device = torch.device("cuda", 0)


def made_up(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.Tensor._make_subclass(MadeUp, torch.zeros(shape, dtype=dtype))


def on_device_1(*shape: int) -> torch.Tensor:
    class Other(MadeUp):
        device = torch.device("cuda", 1)

    return torch.Tensor._make_subclass(Other, torch.zeros(shape))


def other(tensor: torch.Tensor) -> torch.Tensor:
    """A made-up tensor of this shape and dtype on the second GPU."""
    return torch.Tensor._make_subclass(type(on_device_1()), torch.zeros(tensor.shape, dtype=tensor.dtype))


def refused(name: str, *args: Any) -> str:
    """What the shim says to these arguments; the slot of the result stays as it was."""
    owned = [handle(arg) for arg in args if isinstance(arg, torch.Tensor)]
    handles = iter(owned)
    c_args: list[Any] = []
    for arg in args:
        if isinstance(arg, float):
            c_args.append(ctypes.c_double(arg))
        elif isinstance(arg, Opt) and arg.kind == "double":
            c_args.append(None if arg.value is None else ctypes.byref(ctypes.c_double(arg.value)))
        elif isinstance(arg, Opt):
            owned.append(handle(arg.value) if arg.value is not None else ctypes.c_void_p())
            c_args.append(ctypes.byref(owned[-1]))
        elif isinstance(arg, torch.Tensor):
            c_args.append(next(handles))
        elif isinstance(arg, str):
            c_args.append(ctypes.c_char_p(arg.encode()))
        else:
            c_args.append(ctypes.c_void_p() if arg is None else ctypes.c_int64(arg))
    slot = ctypes.c_void_p(0x5A)
    try:
        with pytest.raises(ShimError) as error:
            raise_on(getattr(lib, name)(*c_args, ctypes.byref(slot)))
    finally:
        for h in owned:
            if h.value:
                delete(h)
    assert slot.value == 0x5A
    return str(error.value)
