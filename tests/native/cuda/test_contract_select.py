"""What the CUDA shims that sort, scan and select refuse, and with which words: no GPU is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.native.shim import CODES, lib, raise_on


class Failure(RuntimeError):
    """A shim's message."""


@pytest.fixture
def blob() -> Iterator[Callable[..., ctypes.c_void_p]]:
    """Makes handles of row-major tensors at an address that is never touched; device 1 is CUDA."""
    made: list[ctypes.c_void_p] = []

    def make(shape: list[int], dtype: torch.dtype = torch.float32, device: int = 1) -> ctypes.c_void_p:
        strides, step = [0] * len(shape), 1
        for d in reversed(range(len(shape))):
            strides[d] = step
            step *= max(shape[d], 1)
        array = ctypes.c_int64 * max(len(shape), 1)
        out = ctypes.c_void_p()
        raise_on(
            lib.aoti_torch_create_tensor_from_blob(
                ctypes.c_void_p(1 << 40), ctypes.c_int64(len(shape)), array(*shape), array(*strides),
                ctypes.c_int64(0), ctypes.c_int32(CODES[dtype]), ctypes.c_int32(device),
                ctypes.c_int32(0 if device == 1 else -1), ctypes.byref(out),
            )
        )  # fmt: skip
        made.append(out)
        return out

    yield make
    for handle in made:
        lib.aoti_torch_delete_tensor_object(handle)


def message(name: str, *args: Any, returns: int = 1) -> str:
    """Calls a shim that must fail and gives its message."""
    kinds = {bool: ctypes.c_int32, int: ctypes.c_int64, float: ctypes.c_double}
    c_args = [kinds[type(a)](a) if type(a) in kinds else a.encode() if isinstance(a, str) else a for a in args]
    slots = [ctypes.c_void_p() for _ in range(returns)]
    assert getattr(lib, f"aoti_torch_cuda_{name}")(*c_args, *map(ctypes.byref, slots)) == 1, name
    return lib.torch_exception_get_what().decode()


def pointer(handle: ctypes.c_void_p) -> Any:
    return ctypes.byref(handle)


UNARY = {
    "sort": (0, False), "sort_stable": (None, 0, False), "topk": (1, 0, True, True), "kthvalue": (1, 0, False),
    "mode": (0, False), "median": (), "nanmedian": (), "cumsum": (0, None), "cumprod": (0, None), "cummax": (0,),
    "cummin": (0,), "logcumsumexp": (0,), "nonzero": (), "nonzero_static": (3, -1), "histc": (4, 0.0, 1.0),
}  # fmt: skip
PAIRS = {"sort", "sort_stable", "topk", "kthvalue", "mode", "cummax", "cummin"}


@pytest.mark.parametrize("name", UNARY)
def test_input_is_there_and_on_the_gpu(name: str, blob: Callable[..., ctypes.c_void_p]) -> None:
    returns = 2 if name in PAIRS else 1
    op = name.removesuffix("_stable")
    assert message(name, None, *UNARY[name], returns=returns) == f"{op}: argument 'self' is null"
    text = message(name, blob([4], device=0), *UNARY[name], returns=returns)
    assert text == f"{op}: argument 'self' is on cpu, expected cuda"


@pytest.mark.parametrize("name", ["sort", "topk", "kthvalue", "mode", "median", "nanmedian", "cummax", "histc"])
def test_complex_has_no_order(name: str, blob: Callable[..., ctypes.c_void_p]) -> None:
    text = message(name, blob([4], torch.complex64), *UNARY[name], returns=2 if name in PAIRS else 1)
    assert text == f"{name}: dtype complex64 is not supported"


def test_dimensions(blob: Callable[..., ctypes.c_void_p]) -> None:
    for name in ("sort", "mode", "cummax"):
        args = (5, False) if name != "cummax" else (5,)
        assert name in message(name, blob([4, 3]), *args, returns=2)
    assert "5" in message("cumsum", blob([4, 3]), 5, None)


def test_counts(blob: Callable[..., ctypes.c_void_p]) -> None:
    text = message("topk", blob([4, 3]), 4, 1, True, True, returns=2)
    assert text == "topk: k is 4, expected 0 to 3 (the size of dimension 1)"
    text = message("kthvalue", blob([4, 3]), 0, 1, False, returns=2)
    assert text == "kthvalue: k is 0, expected 1 to 3 (the size of dimension 1)"
    assert message("mode", blob([4, 0]), 1, False, returns=2) == "mode: dimension 1 of shape [4, 0] is empty"
    assert message("nonzero_static", blob([4]), -1, 0) == "nonzero_static: 'size' is -1, expected 0 or more"
    text = message("sort", blob([1 << 31], torch.uint8), 0, False, returns=2)
    assert text == "sort: 2147483648 elements in a row, expected at most 2147483647"


def test_scan_dtypes(blob: Callable[..., ctypes.c_void_p]) -> None:
    to_bool = ctypes.byref(ctypes.c_int32(CODES[torch.bool]))
    assert message("cumsum", blob([4]), 0, to_bool) == "cumsum: dtype bool is not supported for the result"
    text = message("logcumsumexp", blob([4], torch.int64), 0)
    assert text == "logcumsumexp: dtype int64 is not supported, expected a floating type"


def test_masked_select(blob: Callable[..., ctypes.c_void_p]) -> None:
    assert message("masked_select", blob([4]), blob([4])) == "masked_select: 'mask' must be bool, got float32"
    text = message("masked_select", blob([4]), blob([3], torch.bool))
    assert text == "masked_select: shapes [4] and [3] do not broadcast together"
    assert message("masked_select", blob([4]), None) == "masked_select: argument 'mask' is null"


def test_repeat_interleave(blob: Callable[..., ctypes.c_void_p]) -> None:
    name = "repeat_interleave_Tensor"
    text = message(name, blob([2, 2], torch.int64), None)
    assert text == "repeat_interleave: 'repeats' must be 1-D, got 2-D"
    text = message(name, blob([2]), None)
    assert text == "repeat_interleave: 'repeats' is float32, expected int32 or int64"
    text = message(name, blob([2], torch.int64), ctypes.byref(ctypes.c_int64(-1)))
    assert text == "repeat_interleave: 'output_size' is -1, expected 0 or more"


def test_search(blob: Callable[..., ctypes.c_void_p]) -> None:
    name = "searchsorted_Tensor"
    rest: tuple[Any, ...] = (False, False, None, None)
    text = message(name, blob([2, 3]), blob([3, 3]), *rest)
    assert text == (
        "searchsorted: the sorted sequence must be 1-D or agree with the values in all but the last dimension, "
        "got [2, 3] and [3, 3]"
    )
    assert "at least one dimension" in message(name, blob([]), blob([3]), *rest)
    side = ctypes.byref(ctypes.c_char_p(b"top"))
    text = message(name, blob([3]), blob([3]), False, False, side, None)
    assert text == 'searchsorted: \'side\' is "top", expected "left" or "right"'
    sorter = blob([3], torch.int32)
    text = message(name, blob([3]), blob([3]), False, False, None, pointer(sorter))
    assert text == "searchsorted: 'sorter' is int32 [3], expected int64 [3]"
    text = message("searchsorted_Scalar", blob([2, 3]), 1.0, *rest)
    assert text == "searchsorted: a scalar needs a 1-D sorted sequence, got 2-D"
    text = message("bucketize_Tensor", blob([4]), blob([2, 2]), False, False)
    assert text == "bucketize: 'boundaries' must be 1-D, got 2-D"


def test_histc(blob: Callable[..., ctypes.c_void_p]) -> None:
    assert message("histc", blob([4]), 0, 0.0, 1.0) == "histc: 'bins' is 0, expected 1 or more"
    assert "expected more than 'min'" in message("histc", blob([4]), 3, 2.0, 1.0)
    assert "is not finite" in message("histc", blob([4]), 3, 0.0, float("inf"))


def test_segment_reduce(blob: Callable[..., ctypes.c_void_p]) -> None:
    name = "segment_reduce"
    lengths = blob([2], torch.int64)
    text = message(name, blob([4]), "sum", None, None, None, 0, False, None)
    assert text == "segment_reduce: either 'lengths' or 'offsets' is needed"
    text = message(name, blob([4]), "median", pointer(lengths), None, None, 0, False, None)
    assert "'reduce' is \"median\"" in text
    text = message(name, blob([4]), "sum", None, pointer(lengths), None, 0, False, None)
    assert "'indices' is not supported" in text
    text = message(name, blob([4, 4]), "sum", pointer(lengths), None, None, 1, False, None)
    assert "'lengths' has shape [2], expected the first 1 sizes of 'data' [4, 4] and one more" in text
    text = message(name, blob([4], torch.int64), "sum", pointer(lengths), None, None, 0, False, None)
    assert text == "segment_reduce: dtype int64 is not supported, expected a floating type"
