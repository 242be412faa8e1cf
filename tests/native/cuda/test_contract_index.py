"""What the indexing, scatter, random, element-wise, shape and embedding shims refuse, with no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.cuda.made_up import made_up, on_device_1
from tests.native.shim import CODES, I32, Handles, Opt, OptHandles, ShimError, call, delete, handle, lib, raise_on

T = made_up
I64 = torch.int64
NONE = [None, None, None, I32(0), None]  # dtype, layout, device, device index, pin_memory


def code(dtype: torch.dtype) -> list[Any]:
    return [Opt(CODES[dtype], "int32"), *NONE[1:]]


def long(*shape: int) -> torch.Tensor:
    return made_up(*shape, dtype=I64)


def mask(*shape: int) -> torch.Tensor:
    return made_up(*shape, dtype=torch.bool)


REFUSED: list[tuple[str, tuple[Any, ...], int, str]] = [
    ("index_Tensor", (torch.zeros(3), OptHandles([long(2)])), 1, "index: argument 'self' is on cpu, expected cuda"),
    ("index_Tensor", (None, OptHandles([long(2)])), 1, "index: argument 'self' is null"),
    ("index_Tensor", (T(3), OptHandles([torch.zeros(2, dtype=I64)])), 1, "argument 'indices' is on cpu, expected cuda"),
    ("index_Tensor", (T(3), OptHandles([on_device_1(2)])), 1,
     "index: argument 'indices' is on cuda:1, 'self' on cuda:0, expected one device"),
    ("index_Tensor", (T(3), OptHandles([T(2)])), 1,
     "index: tensors used as indices must be int64, int32, bool or uint8, got float32"),
    ("index_Tensor", (T(3), OptHandles([long(2), long(2)])), 1, "index: too many indices: 2 for a 1-D tensor"),
    ("index_Tensor", (T(3, 4), OptHandles([long(2), long(3)])), 1, r"index: shapes \[2\] and \[3\] do not broadcast"),
    ("index_Tensor", (T(3, 4), OptHandles([mask(3, 5)])), 1,
     r"index: the mask of shape \[3, 5\] at dimension 0 does not match the indexed tensor of shape \[3, 4\]"),
    ("index_Tensor", (T(3), OptHandles([mask()])), 1, "index: a 0-D mask is not supported"),
    ("index_Tensor", (T(3), OptHandles([None])), 1, "index: at least one index tensor is needed"),
    ("index_put", (T(3), OptHandles([long(2)]), long(2), I32(0)), 1,
     "index_put: 'values' is int64, expected float32 as 'self'"),
    ("index_put", (T(3), OptHandles([long(2)]), T(5), I32(0)), 1,
     r"index_put: 'values' of shape \[5\] does not broadcast to \[2\]"),
    ("index_put", (T(3), OptHandles([long(2)]), torch.zeros(2), I32(0)), 1,
     "index_put: argument 'values' is on cpu, expected cuda"),
    ("masked_scatter", (T(3), T(3), T(3)), 1, "masked_scatter: 'mask' must be bool, got float32"),
    ("masked_scatter", (T(3), mask(3), long(3)), 1, "masked_scatter: 'source' is int64, expected float32 as 'self'"),
    ("masked_scatter", (T(3), mask(4), T(3)), 1, r"masked_scatter: shapes \[3\] and \[4\] do not broadcast"),
    ("index_reduce", (T(3), 0, long(2), T(2), "sum", I32(1)), 1, "index_reduce: 'reduce' is \"sum\", expected \"prod\""),
    ("index_reduce", (T(3), 0, long(2, 1), T(2), "amax", I32(1)), 1, "index_reduce: 'index' must be 1-D, got 2-D"),
    ("index_reduce", (T(3), 0, long(2), T(4), "amax", I32(1)), 1,
     r"index_reduce: 'source' has shape \[4\], expected \[2\]"),
    ("index_reduce", (T(3), 0, T(2), T(2), "amax", I32(1)), 1,
     "index_reduce: 'index' is float32, expected int64 or int32"),
    ("scatter_src_out", (T(3), T(4), 0, long(2), T(2)), 0,
     r"scatter: 'out' is float32 \[3\], expected float32 \[4\] as 'self'"),
    ("scatter_src_out", (T(3), T(3), 1, long(2), T(2)), 0, "scatter: .*dim"),
    ("scatter_src_out", (T(3), T(3), 0, long(2, 2), T(2)), 0, "scatter: 'index' is 2-D, expected 1-D as 'self'"),
    ("scatter_src_out", (T(3, 2), T(3, 2), 0, long(1, 3), T(2, 3)), 0,
     r"scatter: 'index' of shape \[1, 3\] is larger than 'self' of shape \[3, 2\] in dimension 1"),
    ("scatter_src_out", (T(3), T(3), 0, long(2), T(1)), 0,
     r"scatter: 'index' of shape \[2\] is larger than 'src' of shape \[1\]"),
    ("scatter_src_out", (T(3), T(3), 0, long(2), long(2)), 0, "scatter: 'src' is int64, expected float32 as 'self'"),
    ("scatter_value_out", (T(3), T(3), 0, T(2), 1.0), 0, "scatter: 'index' is float32, expected int64 or int32"),
    ("scatter_reduce_two_out", (T(3), T(3), 0, long(2), T(2), "median", I32(1)), 0,
     "scatter_reduce: 'reduce' is \"median\", expected \"sum\", \"prod\", \"mean\", \"amax\" or \"amin\""),
    ("scatter_reduce_two_out",
     (T(3, dtype=torch.complex64), T(3, dtype=torch.complex64), 0, long(2), T(2, dtype=torch.complex64), "sum", I32(1)),
     0, "scatter_reduce: dtype complex64 is not supported"),
    ("rand", ([2, 3], *code(I64)), 1, "rand: dtype int64 is not supported, expected a floating type"),
    ("rand", ([2, 3], None, None, Opt(0, "int32"), I32(0), None), 1, "rand: argument 'device' is cpu, expected cuda"),
    ("rand", ([2, 3], None, Opt(1, "int32"), None, I32(0), None), 1, r"rand: layout code 1 is not supported"),
    ("randn", ([2, -3], *NONE), 1, "negative"),
    ("randint", (0, [3], *NONE), 1, "randint: 'low' is 0, expected less than 'high' 0"),
    ("randint", (300, [3], *code(torch.uint8)), 1, r"randint: the range \[0, 300\) does not fit dtype uint8"),
    ("randint_low_out", (long(4), 0, 5, [3]), 0, r"randint: 'out' has shape \[4\], expected \[3\]"),
    ("rand_like", (T(2), *code(torch.bool), None), 1, "rand_like: dtype bool is not supported"),
    ("randperm", (-1, *NONE), 1, "randperm: 'n' is -1, expected 0 or more"),
    ("randperm", (2**33, *NONE), 1, "randperm: 8589934592 indices are more than the 4294967295"),
    ("uniform", (T(3), 2.0, 1.0, None), 1, "uniform: 'from' is 2, expected at most 'to' 1"),
    ("normal_functional", (T(3), 0.0, -1.0, None), 1, "normal: 'std' is -1, expected 0 or more"),
    ("exponential", (T(3), 0.0, None), 1, "exponential: 'lambd' is 0, expected more than 0"),
    ("exponential", (long(3), 1.0, None), 1, "exponential: dtype int64 is not supported"),
    ("bernoulli__float", (T(3), 1.5, None), 0, "bernoulli_: 'p' holds 1.5, expected 0 to 1"),
    ("bernoulli__Tensor", (T(3), T(4), None), 0, r"bernoulli_: 'p' of shape \[4\] does not broadcast to \[3\]"),
    ("bernoulli__Tensor", (T(3), long(3), None), 0, "bernoulli_: dtype int64 of 'p' is not supported"),
    ("native_dropout", (T(3), 1.5, Opt(1, "int32")), 2, "native_dropout: argument 'p' must be between 0 and 1, got 1.5"),
    ("native_dropout", (long(3), 0.5, Opt(1, "int32")), 2, "native_dropout: dtype int64 is not supported"),
    ("add_Tensor", (T(3), T(4), 1.0), 1, r"add: shapes \[3\] and \[4\] do not broadcast together"),
    ("add_Tensor", (long(3), long(3), 0.5), 1, "add: 'alpha' is 0.5, expected a whole number for dtype int64"),
    ("add_Tensor", (T(3), torch.zeros(3), 1.0), 1, "add: argument 'other' is on cpu, expected cuda"),
    ("add_Tensor", (torch.zeros(()), torch.zeros(()), 1.0), 1, "add: both operands are on cpu, expected one on cuda"),
    ("mul_Tensor", (T(3), on_device_1(3)), 1, "mul: operands are on cuda:0 and cuda:1, expected one device"),
    ("pow_Tensor_Tensor", (mask(3), mask(3)), 1, "pow: dtype bool is not supported"),
    ("gcd", (T(3), T(3)), 1, "gcd: dtype float32 is not supported, expected an integer type"),
    ("polar", (T(3), long(3)), 1, "polar: 'abs' and 'angle' must both be float32 or float64, got float32 and int64"),
    ("abs", (mask(3),), 1, "abs: dtype bool is not supported"),
    ("cat", (Handles([]), 0, 0), 1, "cat: expected at least one tensor"),
    ("cat", (Handles([T(2, 3), T(2, 4)]), 2, 0), 1,
     r"cat: tensor 1 has shape \[2, 4\], expected \[2, 3\] except in dimension 0"),
    ("cat", (Handles([T(2), on_device_1(2)]), 2, 0), 1,
     "cat: tensor 1 is on cuda:1, tensor 0 on cuda:0, expected one device"),
    ("pad", (T(3), [1], "constant", Opt(None)), 1, "pad: argument 'pad' must have an even number of values"),
    ("pad", (T(3), [1, 1], "mirror", Opt(None)), 1, "pad: argument 'mode' must be constant, reflect, replicate"),
    ("pad", (T(2, 3), [3, 1], "reflect", Opt(None)), 1, "pad: reflect padding may be at most 2 for a dimension of size 3"),
    ("pad", (T(2, 3), [1, 1], "reflect", Opt(1.0, "double")), 1, "pad: mode 'reflect' takes no value, got 1"),
    ("cat", (Handles([T(2), torch.zeros(2)]), 2, 0), 1, "cat: argument 'tensors' is on cpu, expected cuda"),
    ("pad", (T(*[1] * 13), [1, 1], "constant", Opt(None)), 1, r"pad: 13 dimensions are more than the kernels take \(12\)"),
    ("fill__Scalar", (torch.zeros(3), 1.0), 0, "fill_: argument 'self' is on cpu, expected cuda"),
    ("fill__Scalar", (T(3, dtype=torch.float8_e5m2), 1.0), 0, "fill_: .*dtype float8_e5m2 is not supported"),
    ("_efficientzerotensor", ([3], Opt(99, "int32"), *NONE[1:]), 1, "_efficientzerotensor: unknown dtype code 99"),
    ("resize_", (T(3), [2], Opt(2, "int32")), 0, "resize_: memory format code 2 is not supported"),
    ("set__source_Tensor", (T(3), torch.zeros(3)), 0, "set_: argument 'source' is on cpu, expected cuda"),
    ("angle", (T(3, dtype=torch.float8_e5m2),), 1, "angle: dtype float8_e5m2 is not supported"),
    ("narrow", (torch.zeros(3), 0, 0, 1), 1, "narrow: argument 'self' is on cpu, expected cuda"),
    ("narrow", (T(3), 0, 2, 2), 1, "narrow: start 2 and length 2 leave dimension 0 of size 3"),
    ("reshape", (T(3), [2, 2]), 1, r"reshape: shape \[2, 2\] does not fit 3 elements"),
    ("permute", (T(3, 2), [0, 0]), 1, "permute: dimension 0 appears twice"),
    ("view_as_complex", (T(3),), 1, "view_as_complex: the last dimension must have size 2"),
    ("hann_window", (-1, *NONE), 1, "hann_window: 'window_length' is -1, expected 0 or more"),
    ("hann_window", (4, *code(I64)), 1, "hann_window: dtype int64 is not supported, expected a floating type"),
]  # fmt: skip


def bag(weight: Any = None, indices: Any = None, offsets: Any = None, mode: int = 0, scales: Any = None,
        last: bool = False, padding: int = -1) -> tuple[Any, ...]:  # fmt: skip
    return (
        T(5, 3) if weight is None else weight, long(4) if indices is None else indices,
        long(2) if offsets is None else offsets, I32(0), mode, I32(0), Opt(scales), I32(last), padding,
    )  # fmt: skip


for arguments, message in [
    (bag(weight=T(5)), r"argument 'weight' must be 2-D, got shape \[5\]"),
    (bag(weight=long(5, 3)), "dtype int64 is not supported, expected a floating type"),
    (bag(indices=T(4)), "argument 'indices' must be int32 or int64, got float32"),
    (bag(offsets=long(2, 2)), r"argument 'offsets' must be 1-D, got shape \[2, 2\]"),
    (bag(mode=3), r"argument 'mode' must be 0 \(sum\), 1 \(mean\) or 2 \(max\), got 3"),
    (bag(mode=1, scales=T(4)), r"argument 'per_sample_weights' goes with mode 0 \(sum\) only, got mode 1"),
    (bag(scales=T(3)), r"argument 'per_sample_weights' must have shape \[4\], got \[3\]"),
    (bag(padding=5), "argument 'padding_idx' must be inside of the table's 5 rows, got 5"),
    (bag(offsets=long(0), last=True), "argument 'offsets' must hold at least one value with include_last_offset"),
]:
    REFUSED.append(("_embedding_bag", arguments, 4, "_embedding_bag: " + message))


@pytest.mark.parametrize(("name", "arguments", "returns", "text"), REFUSED)
def test_refused(name: str, arguments: tuple[Any, ...], returns: int, text: str) -> None:
    with pytest.raises(ShimError, match=text):
        call(f"aoti_torch_cuda_{name}", *arguments, returns=returns)


def test_views_need_no_gpu() -> None:
    h, out, data = handle(made_up(4, 6)), ctypes.c_void_p(), ctypes.c_void_p()
    try:
        raise_on(lib.aoti_torch_cuda_narrow(h, *map(ctypes.c_int64, (0, 1, 2)), ctypes.byref(out)))
        sizes = ctypes.POINTER(ctypes.c_int64)()
        raise_on(lib.aoti_torch_get_sizes(out, ctypes.byref(sizes)))
        assert sizes[:2] == [2, 6]
        raise_on(lib.aoti_torch_cuda_reshape(h, (ctypes.c_int64 * 2)(2, -1), ctypes.c_int64(2), ctypes.byref(data)))
        delete(data)
    finally:
        delete(h)
        delete(out)


@pytest.mark.parametrize(("name", "arguments"), [
    ("aoti_torch_index_put_out", (T(3), T(3), Handles([T(2)]), I32(1), T(2), I32(0))),
    ("aoti_torch_scatter_out", (T(3), T(3), 0, T(2), T(2))),
    ("aoti_torch_scatter_reduce_out", (T(3), T(3), 0, T(2), T(2), "sum", I32(1))),
    ("aoti_torch_aten_pad", (T(3), [1], "constant", Opt(None), Opt(None))),
    ("aoti_torch_aten_subtract_Tensor", (mask(3), mask(3), 1.0, Opt(None))),
])  # fmt: skip
def test_names_without_a_device_serve_cuda(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ShimError) as refused:
        call(name, *arguments)
    assert "expected cpu" not in str(refused.value)


def test_names_without_a_device_that_give_results_serve_cuda() -> None:
    with pytest.raises(ShimError, match="^repeat_interleave: 'repeats' is float32, expected int32 or int64$"):
        call("aoti_torch_repeat_interleave_Tensor", T(3), Opt(None), returns=1)
    bags = (T(5, 3), long(4), long(2), I32(0), I32(3), I32(0), None, I32(0), I32(-1))
    with pytest.raises(ShimError, match="^_embedding_bag: argument 'mode' must be 0 .* got 3$"):
        call("aoti_torch__embedding_bag", *bags, returns=4)
