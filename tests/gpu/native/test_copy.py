"""Copies, clones, fills and items on the GPU against torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import I32, call, delete, handle, lib, raise_on

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 20
    if dtype == torch.uint8:
        x = x.abs()
    return x.to(dtype)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_copy_any_strides_and_dtypes(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 7), max_size=5))
    src_dtype, dst_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    if dst_dtype == torch.uint8 and src_dtype != torch.uint8:
        dst_dtype = torch.int32  # negative floats to unsigned integers are undefined
    order = draw(st.permutations(range(len(shape))))
    src = tensor([shape[i] for i in order], src_dtype, draw(st.integers(0, 99)))
    src = src.permute([order.index(i) for i in range(len(shape))]) if shape else src
    if shape and draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        src = src.narrow(axis, 0, 1)
    if shape and draw(st.booleans()):
        dst = torch.zeros([n + 1 for n in shape], dtype=dst_dtype)[tuple(slice(1, None) for _ in shape)]
    else:
        dst = torch.zeros(shape, dtype=dst_dtype)
    where = draw(st.sampled_from([("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]))
    want = dst.clone().copy_(src)
    # .to() would make a dense copy: keep the strides on the device too.
    room = torch.zeros(dst.untyped_storage().nbytes() // dst.element_size(), dtype=dst_dtype, device=where[0])
    got = room.as_strided(dst.shape, dst.stride(), dst.storage_offset())
    given_src = src
    if where[1] == "cuda":
        flat = torch.empty(0, dtype=src_dtype).set_(src.untyped_storage()).cuda()
        given_src = flat.as_strided(src.shape, src.stride(), src.storage_offset())
    torch.cuda.synchronize()
    call("aoti_torch_copy_", got, given_src, I32(0))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("shape", [(1000, 1000), (3, 5, 7), (0, 4), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = tensor(list(shape), dtype, 1).cuda()
    assert torch.equal(call("aoti_torch_clone", x, returns=1), x)
    if x.dim() == 2:
        got = call("aoti_torch_clone", x.t(), returns=1)
        assert torch.equal(got, x.t())
        assert got.stride() == x.t().clone().stride()
        assert torch.equal(call("aoti_torch_clone_preserve_strides", x.t(), returns=1), x.t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero(dtype: torch.dtype) -> None:
    x = torch.ones(5, 7, dtype=dtype, device="cuda")
    call("aoti_torch_zero_", x[1:4, ::2])
    want = torch.ones(5, 7, dtype=dtype)
    want[1:4, ::2] = 0
    assert torch.equal(x.cpu(), want)


def test_item() -> None:
    x = torch.tensor([1.5, -2.25], device="cuda")
    h, value = handle(x[1]), ctypes.c_float()
    raise_on(lib.aoti_torch_item_float32(h, ctypes.byref(value)))
    delete(h)
    assert value.value == -2.25
