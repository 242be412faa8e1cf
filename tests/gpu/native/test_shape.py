"""Views, cat, pad and factories on the GPU against torch on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import CODES, I32, Handles, Opt, call

DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex128]


def values(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cat(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    mixed = draw(st.booleans())
    dtype = draw(st.sampled_from(DTYPES))
    parts = []
    for k in range(draw(st.integers(1, 6))):
        own = [draw(st.integers(0, 8)) if d == dim else n for d, n in enumerate(shape)]
        part = values(own, draw(st.sampled_from(DTYPES)) if mixed else dtype, k)
        parts.append(part.transpose(0, -1).contiguous().transpose(0, -1) if draw(st.booleans()) else part)
    if draw(st.booleans()):
        parts.append(torch.zeros(0, dtype=dtype))
    want = torch.cat(parts, dim)
    got = call("aoti_torch_cuda_cat", Handles([p.cuda() for p in parts]), len(parts), dim, returns=1)
    assert got.dtype == want.dtype and torch.equal(got.cpu(), want)


def test_cat_many_wide_and_channels_last() -> None:
    parts = [torch.rand(50, 64 * (k % 3 + 1)) for k in range(150)]
    got = call("aoti_torch_cuda_cat", Handles([p.cuda() for p in parts]), len(parts), -1, returns=1)
    assert torch.equal(got.cpu(), torch.cat(parts, -1))
    images = [torch.rand(2, c, 5, 4).to(memory_format=torch.channels_last) for c in (3, 8)]
    got = call("aoti_torch_cuda_cat", Handles([p.cuda() for p in images]), 2, 1, returns=1)
    want = torch.cat(images, 1)
    assert torch.equal(got.cpu(), want) and got.stride() == want.stride()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pad_constant(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    x = values(shape, draw(st.sampled_from(DTYPES)), 1)
    pads: list[int] = []
    for n in reversed(shape[draw(st.integers(0, len(shape))) :]):
        before = draw(st.integers(-n, 4))
        pads += [before, draw(st.integers(-(n + min(before, 0)), 4))]
    want = torch.constant_pad_nd(x, pads, 3)
    got = call("aoti_torch_cuda_pad", x.cuda(), pads, "constant", Opt(3.0, "double"), returns=1)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize(("shape", "pads"), [
    ([2, 3, 7], [2, 3]), ([3, 5, 6], [1, 2, 4, 0]), ([2, 3, 5, 6], [1, 2, 0, 3]), ([2, 3, 4, 5, 6], [1, 2, 2, 1, 3, 0]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_pad_modes(mode: str, shape: list[int], pads: list[int], dtype: torch.dtype) -> None:
    for name in ("aoti_torch_cuda_pad", "aoti_torch_aten_pad"):
        x = values(shape, dtype, 2)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        want = torch.nn.functional.pad(x.double() if dtype == torch.float16 else x, pads, mode).to(dtype)
        got = call(name, x.cuda(), pads, mode, Opt(None), returns=1)
        assert torch.equal(got.cpu(), want)


X = torch.arange(24.0).reshape(2, 3, 4)
VIEWS: list[tuple[str, tuple[Any, ...], torch.Tensor]] = [
    ("narrow", (X, 1, -2, 2), X.narrow(1, -2, 2)),
    ("slice_Tensor", (X, 2, Opt(-3, "int64"), Opt(100, "int64"), 2), X[:, :, -3:100:2]),
    ("permute", (X, [2, 0, -2]), X.permute(2, 0, 1)),
    ("reshape", (X, [6, -1]), X.reshape(6, 4)),
    ("reshape", (X.transpose(0, 2), [-1, 2]), X.transpose(0, 2).reshape(-1, 2)),
    ("squeeze_dim", (X[:, :1], 1), X[:, 0]),
    ("view_dtype", (X, I32(CODES[torch.int32])), X.view(torch.int32)),
    ("view_dtype", (X, I32(CODES[torch.complex64])), X.view(torch.complex64)),
    ("view_as_complex", (X.reshape(2, 3, 2, 2),), torch.view_as_complex(X.reshape(2, 3, 2, 2))),
    ("view_as_real", (X.view(torch.complex64),), torch.view_as_real(X.view(torch.complex64))),
]


def is_dense(a: torch.Tensor) -> bool:
    """One run of memory without holes or overlaps, in any order of dimensions."""
    dims = sorted((stride, size) for stride, size in zip(a.stride(), a.shape, strict=True) if size > 1)
    return all(stride == math.prod(size for _, size in dims[:i]) for i, (stride, _) in enumerate(dims))


@pytest.mark.parametrize(("name", "args", "want"), VIEWS)
def test_views(name: str, args: tuple[Any, ...], want: torch.Tensor) -> None:
    on_gpu = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda").copy_(a)
              if isinstance(a, torch.Tensor) and a.dim() and is_dense(a)
              else a.cuda() if isinstance(a, torch.Tensor) else a for a in args]  # fmt: skip
    got = call(f"aoti_torch_cuda_{name}", *on_gpu, returns=1)
    assert torch.equal(got.cpu(), want)


def test_factories() -> None:
    cuda = [None, Opt(1, "int32"), I32(0), None]
    for n in (0, 1, 2, 5, 400):
        for dtype in (torch.float32, torch.float64, torch.float16):
            got = call("aoti_torch_cuda_hann_window", n, Opt(CODES[dtype], "int32"), *cuda, returns=1)
            torch.testing.assert_close(got.cpu(), torch.hann_window(n, dtype=torch.float64).to(dtype))
    got = call("aoti_torch_cuda__efficientzerotensor", [3, 4], Opt(CODES[torch.int16], "int32"), *cuda, returns=1)
    assert torch.equal(got.cpu(), torch.zeros(3, 4, dtype=torch.int16))
