"""What the CUDA GEMM operators refuse, and with which words. Needs no GPU: the tensors' address is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.shim import CODES, ShimError, delete, handle, lib, raise_on

ADDRESS = 1 << 20
Shape = tuple[int, ...]
F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
I8, I32, E4M3, E5M2 = torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2
EIGHT_BITS = {E5M2: 23, E4M3: 24}


def fake(*shape: int, dtype: torch.dtype = F32, device: int = 0) -> ctypes.c_void_p:
    """A handle on CUDA memory that is never touched."""
    strides = torch.empty(shape, device="meta").stride()
    length = max(len(shape), 1)
    out = ctypes.c_void_p()
    raise_on(
        lib.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(ADDRESS), ctypes.c_int64(len(shape)), (ctypes.c_int64 * length)(*shape),
            (ctypes.c_int64 * length)(*strides), ctypes.c_int64(0), ctypes.c_int32({**CODES, **EIGHT_BITS}[dtype]),
            ctypes.c_int32(1), ctypes.c_int32(device), ctypes.byref(out),
        )
    )  # fmt: skip
    return out


def refusal(name: str, *args: Any, slots: int = 0) -> str:
    """The text of a shim's refusal. None is a null pointer, a list a pointer to its only item, an int an int32."""
    keep: list[Any] = []
    c_args: list[Any] = []
    for arg in args:
        if isinstance(arg, list):
            keep.append(ctypes.c_int32(arg[0]) if isinstance(arg[0], int) else arg[0])
            c_args.append(ctypes.byref(keep[-1]))
        elif isinstance(arg, int):
            c_args.append(ctypes.c_int32(arg))
        elif isinstance(arg, float):
            c_args.append(ctypes.c_double(arg))
        else:
            c_args.append(ctypes.c_void_p() if arg is None else arg)
    out = [ctypes.c_void_p() for _ in range(slots)]
    shim = getattr(lib, name if name.startswith("aoti_torch_") else f"aoti_torch_cuda_{name}")
    try:
        with pytest.raises(ShimError) as error:
            raise_on(shim(*c_args, *map(ctypes.byref, out)))
    finally:
        for arg in args:
            h = arg[0] if isinstance(arg, list) else arg
            if isinstance(h, ctypes.c_void_p):
                delete(h)
    return str(error.value)


@pytest.mark.parametrize(
    ("out", "self", "mat2", "expected"),
    [
        (None, fake(2, 3), fake(3, 4), "mm: argument 'out' is null"),
        (fake(2, 4), None, fake(3, 4), "mm: argument 'self' is null"),
        (fake(2, 4), fake(2, 3), None, "mm: argument 'mat2' is null"),
        (fake(2, 4), handle(torch.zeros(2, 3)), fake(3, 4), "mm: argument 'self' is on cpu, expected cuda"),
        (handle(torch.zeros(2, 4)), fake(2, 3), fake(3, 4), "mm: argument 'out' is on cpu, expected cuda"),
        (fake(2, 4), fake(3), fake(3, 4), "mm: argument 'self' must be 2-D, got shape [3]"),
        (fake(2, 4), fake(2, 3), fake(1, 3, 4), "mm: argument 'mat2' must be 2-D, got shape [1, 3, 4]"),
        (fake(2, 4), fake(2, 3), fake(3, 4, dtype=F16),
         "mm: 'self' and 'mat2' must have the same dtype, got float32 and float16"),
        (fake(2, 4), fake(2, 3), fake(5, 4), "mm: the inner sizes differ: 'self' is [2, 3], 'mat2' is [5, 4]"),
        (fake(2, 4, dtype=F16), fake(2, 3), fake(3, 4), "mm: argument 'out' must be float32, got float16"),
        (fake(4, 2), fake(2, 3), fake(3, 4), "mm: argument 'out' must have shape [2, 4], got [4, 2]"),
        (fake(2, 4), fake(2, 3), fake(3, 4, device=1), "mm: operands are on cuda:0 and cuda:1, expected one device"),
        (fake(2, 4, device=1), fake(2, 3), fake(3, 4), "mm: operands are on cuda:0 and cuda:1, expected one device"),
        (fake(2, 4, dtype=I32), fake(2, 3, dtype=I32), fake(3, 4, dtype=I32),
         "mm: dtype int32 is not supported on a GPU, expected float32, bfloat16, float16 or float64; convert the "
         "operands"),
        (fake(2, 4, dtype=torch.complex64), fake(2, 3, dtype=torch.complex64), fake(3, 4, dtype=torch.complex64),
         "mm: dtype complex64 is not supported on a GPU, expected float32, bfloat16, float16 or float64; convert the "
         "operands"),
    ],
)  # fmt: skip
def test_mm(out: Any, self: Any, mat2: Any, expected: str) -> None:
    assert refusal("mm_out", out, self, mat2) == expected


def test_bmm() -> None:
    assert refusal("bmm_out", fake(2, 3, 5), fake(2, 3, 4), fake(3, 4, 5)) == (
        "bmm: the batch sizes differ: 'self' is [2, 3, 4], 'mat2' is [3, 4, 5]"
    )
    assert refusal("bmm_out", fake(2, 3, 5), fake(3, 4), fake(2, 4, 5)) == (
        "bmm: argument 'self' must be 3-D, got shape [3, 4]"
    )
    assert refusal("bmm_out", fake(1, 3, 5), fake(2, 3, 4), fake(2, 4, 5)) == (
        "bmm: argument 'out' must have shape [2, 3, 5], got [1, 3, 5]"
    )


def test_mm_dtype() -> None:
    halves = {"dtype": F16}
    assert refusal("mm_dtype_out", fake(2, 4, dtype=BF16), fake(2, 3, **halves), fake(3, 4, **halves), 15) == (
        "mm: out_dtype must be float16 like the operands, or float32 for bfloat16 and float16; got bfloat16 for float16"
    )
    assert refusal("mm_dtype_out", fake(2, 4), fake(2, 3), fake(3, 4), 7) == (
        "mm: out_dtype must be float32 like the operands, or float32 for bfloat16 and float16; got float64 for float32"
    )
    assert refusal("mm_dtype_out", fake(2, 4, **halves), fake(2, 3, **halves), fake(3, 4, **halves), 6) == (
        "mm: argument 'out' must be float32, got float16"
    )


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_addmm(beta: float) -> None:
    for out, self, a, b, expected in [
        (fake(2, 4), fake(3), fake(2, 3), fake(3, 4), "addmm: 'self' of shape [3] does not broadcast to [2, 4]"),
        (fake(2, 4), fake(1, 2, 4), fake(2, 3), fake(3, 4),
         "addmm: 'self' of shape [1, 2, 4] does not broadcast to [2, 4]"),
        (fake(2, 4), fake(4, dtype=F64), fake(2, 3), fake(3, 4),
         "addmm: 'self' must have the operands' dtype float32, got float64"),
        (fake(2, 4), None, fake(2, 3), fake(3, 4), "addmm: argument 'self' is null"),
        (fake(2, 4), fake(4), fake(2, 3), fake(4, 4),
         "addmm: the inner sizes differ: 'mat1' is [2, 3], 'mat2' is [4, 4]"),
        (fake(2, 4), fake(4, device=1), fake(2, 3), fake(3, 4),
         "addmm: operands are on cuda:0 and cuda:1, expected one device"),
    ]:  # fmt: skip
        assert refusal("addmm_out", out, self, a, b, beta, 1.0) == expected


def test_relatives_of_addmm() -> None:
    assert refusal("baddbmm_out", fake(2, 3, 5), fake(2, 5), fake(2, 3, 4), fake(2, 4, 5), 1.0, 1.0) == (
        "baddbmm: 'self' of shape [2, 5] does not broadcast to [2, 3, 5]"
    )
    assert refusal("addbmm", fake(5, 3), fake(2, 3, 4), fake(2, 4, 5), 1.0, 1.0, slots=1) == (
        "addbmm: 'self' of shape [5, 3] does not broadcast to [3, 5]"
    )
    assert refusal("addmv", fake(3), fake(3, 4), fake(5), 1.0, 1.0, slots=1) == (
        "addmv: the inner sizes differ: 'mat' is [3, 4], 'vec' is [5]"
    )
    assert refusal("addmv", fake(3), fake(3, 4), fake(4, 1), 1.0, 1.0, slots=1) == (
        "addmv: argument 'vec' must be 1-D, got shape [4, 1]"
    )
    assert refusal("addmv", fake(4), fake(3, 4), fake(4), 1.0, 1.0, slots=1) == (
        "addmv: 'self' of shape [4] does not broadcast to [3]"
    )
    assert refusal("_addmm_activation", fake(5), fake(2, 3), fake(3, 4), 1.0, 1.0, 1, slots=1) == (
        "_addmm_activation: 'self' of shape [5] does not broadcast to [2, 4]"
    )


def test_int_mm() -> None:
    assert refusal("_int_mm_out", fake(2, 4, dtype=I32), fake(2, 3, dtype=torch.uint8), fake(3, 4, dtype=I8)) == (
        "_int_mm: argument 'self' must be int8, got uint8"
    )
    assert refusal("_int_mm_out", fake(2, 4), fake(2, 3, dtype=I8), fake(3, 4, dtype=I8)) == (
        "_int_mm: argument 'out' must be int32, got float32"
    )
    assert refusal("_int_mm_out", fake(2, 4, dtype=I32), fake(2, 3, dtype=I8), fake(4, 4, dtype=I8)) == (
        "_int_mm: the inner sizes differ: 'self' is [2, 3], 'mat2' is [4, 4]"
    )


def scaled(*, a: torch.dtype = E4M3, b: torch.dtype = E4M3, k: int = 32, n: int = 16, scale_a: Shape = (1,),
           scale_b: Shape = (1,), scales: torch.dtype = F32, bias: Any = None, out_dtype: int = 15) -> str:  # fmt: skip
    return refusal(
        "_scaled_mm", fake(4, k, dtype=a), fake(k, n, dtype=b), fake(*scale_a, dtype=scales),
        fake(*scale_b, dtype=scales), bias, None, [out_dtype], 0, slots=1,
    )  # fmt: skip


def test_scaled_mm() -> None:
    assert scaled(a=F16) == ("_scaled_mm: operands must be float8_e4m3fn or float8_e5m2, got float16 and float8_e4m3fn")
    assert scaled(a=E5M2, b=E5M2) == (
        "_scaled_mm: two float8_e5m2 operands are not supported on a GPU, one must be float8_e4m3fn"
    )
    assert scaled(k=24) == (
        "_scaled_mm: the inner size and the columns of 'mat2' must be multiples of 16 on a GPU, got 'self' [4, 24] and "
        "'mat2' [24, 16]"
    )
    assert scaled(out_dtype=7) == ("_scaled_mm: out_dtype must be float8, bfloat16, float16 or float32, got float64")
    assert scaled(scales=F16) == "_scaled_mm: argument 'scale_a' must be float32, got float16"
    assert scaled(scale_a=(4, 1)) == (
        "_scaled_mm: argument 'scale_b' must hold one value, or both scales must be [m, 1] and [1, n]; got shape [1]"
    )
    assert scaled(scale_a=(4, 1), scale_b=(1, 16), out_dtype=24) == (
        "_scaled_mm: with scales of rows and columns out_dtype must be bfloat16, float16 or float32, got float8_e4m3fn"
    )
    assert scaled(bias=[fake(15, dtype=BF16)]) == "_scaled_mm: argument 'bias' must have shape [16], got [15]"
    assert scaled(bias=[fake(16, dtype=F16)]) == (
        "_scaled_mm: argument 'bias' must be bfloat16 for an out_dtype of bfloat16, got float16"
    )
    assert scaled(bias=[fake(16)], out_dtype=6) == (
        "_scaled_mm: argument 'bias' is not supported with an out_dtype of float32 (nor by PyTorch); add it after"
    )


def grouped(a: Any, b: Any, offs: Any, bias: Any = None, out_dtype: Any = None) -> str:
    return refusal("_grouped_mm", a, b, offs, bias, out_dtype, slots=1)


def test_grouped_mm() -> None:
    def half(*shape: int) -> ctypes.c_void_p:
        return fake(*shape, dtype=BF16)

    def ends(count: int, dtype: torch.dtype = I32) -> list[ctypes.c_void_p]:
        return [fake(count, dtype=dtype)]

    assert grouped(fake(8, 16, dtype=F64), fake(2, 16, 8, dtype=F64), ends(2)) == (
        "_grouped_mm: argument 'self' must be float32, bfloat16 or float16, got float64"
    )
    assert grouped(half(8, 16), half(2, 16, 8), None) == "_grouped_mm: 'offs' is needed with a 2-D operand"
    assert grouped(half(2, 8, 16), half(2, 16, 8), ends(2)) == (
        "_grouped_mm: 'offs' must be absent for two 3-D operands"
    )
    assert grouped(half(8, 16), half(2, 16, 8), ends(3)) == "_grouped_mm: argument 'offs' must have 2 entries, got 3"
    assert grouped(half(8, 16), half(2, 16, 8), ends(2, torch.int64)) == (
        "_grouped_mm: argument 'offs' must be int32, got int64"
    )
    assert grouped(half(8, 16), half(2, 24, 8), ends(2)) == (
        "_grouped_mm: the inner sizes differ: 'self' is [8, 16], 'mat2' is [2, 24, 8]"
    )
    assert grouped(half(8, 16), half(2, 16, 8), ends(2), [half(8)]) == (
        "_grouped_mm: argument 'bias' is not supported (PyTorch has none either); add it after"
    )
    assert grouped(half(8, 16), half(2, 16, 8), ends(2), None, [6]) == (
        "_grouped_mm: out_dtype must be bfloat16 like 'self', got float32"
    )


def test_moe_grouped_mm() -> None:
    def refused(*operands: Any) -> str:
        return refusal("moe_grouped_mm", *operands, slots=1)

    assert refused(fake(8, 16, dtype=F64), fake(2, 16, 8, dtype=F64), fake(2, dtype=I32)) == (
        "moe_grouped_mm: argument 'input' must be float32, bfloat16 or float16, got float64"
    )
    assert refused(fake(8, 16), fake(2, 24, 8), fake(2, dtype=I32)) == (
        "moe_grouped_mm: 'input' must be [tokens, K] and 'weight' [experts, K, N] of its dtype, got float32 [8, 16] and "
        "float32 [2, 24, 8]"
    )
    assert refused(fake(8, 16), fake(2, 16, 8), fake(3, dtype=I32)) == (
        "moe_grouped_mm: argument 'offs' must have 2 entries, got 3"
    )
    assert refused(fake(8, 16), fake(2, 16, 8, device=1), fake(2, dtype=I32)) == (
        "moe_grouped_mm: operands are on cuda:0 and cuda:1, expected one device"
    )


def test_library_paths() -> None:
    lib.untorch_last_error.restype = ctypes.c_char_p
    assert lib.untorch_add_library_path(b"/opt/nvidia/lib") == 0
    assert lib.untorch_add_library_path(b"relative") == 2
    assert lib.untorch_last_error() == b"untorch_add_library_path: folder must be an absolute path"
    lib.untorch_gpu_libraries.restype = ctypes.c_char_p
    assert isinstance(lib.untorch_gpu_libraries(), bytes)


def test_names_without_a_device_serve_cuda() -> None:
    wrong = "mm: the inner sizes differ: 'self' is [2, 3], 'mat2' is [4, 5]"
    assert refusal("aoti_torch_mm_out", fake(2, 5), fake(2, 3), fake(4, 5)) == wrong
    both = refusal("aoti_torch__mm_plus_mm_out", fake(2, 5), fake(2, 3), fake(4, 5), fake(2, 3), fake(3, 5))
    assert both == "_mm_plus_" + wrong
    assert "'mat2' is [1, 4, 5]" in refusal("aoti_torch_bmm_out", fake(1, 2, 5), fake(1, 2, 3), fake(1, 4, 5))
    factors = ctypes.c_float(1), ctypes.c_float(1)
    text = refusal("aoti_torch_addmm_out", fake(2, 5), fake(2, 5), fake(2, 3), fake(4, 5), *factors)
    assert text == "addmm: the inner sizes differ: 'mat1' is [2, 3], 'mat2' is [4, 5]"
    operands = fake(2, 3), fake(4, 5), fake(1), fake(1)
    text = refusal("aoti_torch__scaled_mm_v2", *operands, None, None, None, ctypes.c_int8(0), slots=1)
    assert text == "_scaled_mm: operands must be float8_e4m3fn or float8_e5m2, got float32 and float32"
