"""item, scalar_to_tensor and the debugging aids."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from shim import ShimError, call, delete, handle, lib, raise_on, to_torch


class Complex64(ctypes.Structure):
    _fields_ = [("re", ctypes.c_float), ("im", ctypes.c_float)]


class Complex128(ctypes.Structure):
    _fields_ = [("re", ctypes.c_double), ("im", ctypes.c_double)]


TYPES: dict[str, tuple[Any, torch.dtype]] = {
    "float32": (ctypes.c_float, torch.float32), "float64": (ctypes.c_double, torch.float64),
    "uint8": (ctypes.c_uint8, torch.uint8), "uint16": (ctypes.c_uint16, torch.uint16),
    "uint32": (ctypes.c_uint32, torch.uint32), "uint64": (ctypes.c_uint64, torch.uint64),
    "int8": (ctypes.c_int8, torch.int8), "int16": (ctypes.c_int16, torch.int16),
    "int32": (ctypes.c_int32, torch.int32), "int64": (ctypes.c_int64, torch.int64), "bool": (ctypes.c_bool, torch.bool),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_there_and_back(name: str) -> None:
    kind, dtype = TYPES[name]
    out, back = ctypes.c_void_p(), kind()
    raise_on(getattr(lib, f"aoti_torch_scalar_to_tensor_{name}")(kind(1), ctypes.byref(out)))
    tensor = to_torch(out)
    assert tensor.dtype == dtype and tensor.shape == () and tensor.item() == 1
    raise_on(getattr(lib, f"aoti_torch_item_{name}")(out, ctypes.byref(back)))
    assert back.value == 1
    delete(out)


def test_half_and_complex() -> None:
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        x = torch.tensor([1.5], dtype=dtype)
        bits, h = ctypes.c_uint16(), handle(x)
        raise_on(getattr(lib, f"aoti_torch_item_{name}")(h, ctypes.byref(bits)))
        assert bits.value == x.view(torch.uint16).item()
        delete(h)
    x = torch.tensor(1 - 2j, dtype=torch.complex64)
    value, h = Complex64(), handle(x)
    raise_on(lib.aoti_torch_item_complex64(h, ctypes.byref(value)))
    assert (value.re, value.im) == (1, -2)
    delete(h)
    for name, kind in (("complex64", Complex64), ("complex128", Complex128)):
        out = ctypes.c_void_p()
        raise_on(getattr(lib, f"aoti_torch_scalar_to_tensor_{name}")(kind(3, 4), ctypes.byref(out)))
        assert to_torch(out).item() == 3 + 4j
        delete(out)


SOURCES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64]
NUMBERS = [True, False, 0, 1, 100, -3, 300, 70000, 2**31, 2**40, 2.75, -0.5, 1e10, 2.0**63, float("nan")]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", TYPES)
def test_item_of_another_dtype(name: str, source: torch.dtype) -> None:
    """As PyTorch: converted, a fraction cut off, and what does not fit is refused."""
    kind, dtype = TYPES[name]
    for x in (torch.tensor(value).to(source) for value in NUMBERS):
        number = x.item()
        wanted: Any = None  # refused
        if dtype == torch.bool:
            wanted = bool(number)
        elif dtype.is_floating_point:
            wanted = kind(number).value
        elif math.isfinite(number) and torch.iinfo(dtype).min <= int(number) <= torch.iinfo(dtype).max:
            wanted = int(number)
        back, h, text = kind(), handle(x), ""
        try:
            raise_on(getattr(lib, f"aoti_torch_item_{name}")(h, ctypes.byref(back)))
        except ShimError as error:
            text = str(error)
        finally:
            delete(h)
        assert ("does not fit" in text) == (wanted is None) == bool(text)
        assert wanted is None or back.value == wanted or wanted != wanted


def test_item_refuses() -> None:
    with pytest.raises(ShimError, match="item: the tensor is complex64, expected int64"):
        _item("int64", torch.tensor(1j, dtype=torch.complex64))
    with pytest.raises(ShimError, match=r"item: the tensor has shape \[2\], expected one element"):
        _item("float32", torch.zeros(2))


def _item(name: str, tensor: torch.Tensor) -> None:
    h, slot = handle(tensor), ctypes.c_int64()
    try:
        raise_on(getattr(lib, f"aoti_torch_item_{name}")(h, ctypes.byref(slot)))
    finally:
        delete(h)


def test_check_inf_and_nan() -> None:
    call("aoti_torch_check_inf_and_nan", "ok", torch.ones(3))
    call("aoti_torch_check_inf_and_nan", "ints", torch.ones(3, dtype=torch.int64))
    for value, word in ((float("nan"), "NaN"), (float("-inf"), "infinity")):
        with pytest.raises(ShimError, match=f"check_inf_and_nan: tensor 'buf3' holds {word}"):
            call("aoti_torch_check_inf_and_nan", "buf3", torch.tensor([1.0, value], dtype=torch.float16))
    with pytest.raises(ShimError, match="holds NaN"):
        call("aoti_torch_check_inf_and_nan", "c", torch.tensor([complex(0, float("nan"))]))


def test_print_and_save(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([[1.0, 3.0]])
    h = handle(x)
    lib.aoti_torch_print_tensor_handle(h, b"before kernel")
    lib.aoti_torch_save_tensor_handle(h, b"buf0", b"before", b"kernel_7")
    delete(h)
    seen = capfd.readouterr()
    assert "before kernel: float32 [1, 2], strides [2, 1], cpu, min 1, max 3, mean 2" in seen.out
    assert "'buf0' of kernel_7 (before) is printed instead" in seen.err
