"""Indexing, masking, searching, concatenation and views against eager PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import CODES, I32, Handles, Opt, OptHandles, ShimError, call, delete, handle, lib, raise_on, to_torch


def same(got: torch.Tensor, expected: torch.Tensor, strides: bool = True) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got, expected)
    if strides and expected.numel():
        significant = [i for i, n in enumerate(expected.shape) if n != 1]
        assert [got.stride(i) for i in significant] == [expected.stride(i) for i in significant]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([":", "1", "2", "0", "m", "t"]), min_size=1, max_size=4), st.booleans(), st.integers(0, 99)
)
def test_index(kinds: list[str], flip: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 4, 5, 2, generator=generator)
    if flip:
        x = torch.rand(2, 5, 4, 3, generator=generator).permute(3, 2, 1, 0)
    if seed % 2:
        x = x[:, :1]
    indices: list[torch.Tensor | None] = []
    for d, kind in enumerate(kinds):
        n = x.shape[d]
        if kind == ":":
            indices.append(None)
        elif kind == "m":
            mask = torch.zeros(n, dtype=torch.bool)
            mask[torch.randperm(n, generator=generator)[:2]] = True
            indices.append(mask)
        else:
            shape = {"0": (), "1": (2,), "2": (3, 2), "t": (2, 3)}[kind]
            index = torch.randint(-n, n, shape, generator=generator)
            indices.append(index.t() if kind == "t" else index)
    if all(i is None for i in indices):
        return
    expected = torch.ops.aten.index.Tensor(x, indices)
    same(call("aoti_torch_cpu_index_Tensor", x, OptHandles(indices), returns=1), expected)
    for accumulate in (False, True):
        values = torch.rand(expected.shape, generator=generator)
        if not accumulate:
            values = values[..., :1] if values.dim() else values
            values = torch.full_like(values, 3.0)
        got = call("aoti_torch_cpu_index_put", x, OptHandles(indices), values, accumulate, returns=1)
        wanted = torch.ops.aten.index_put(x, indices, values, accumulate)
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()
        out = torch.empty_like(x)
        call("aoti_torch_index_put_out", out, x, Handles(indices), I32(len(indices)), values, accumulate)
        torch.testing.assert_close(out, wanted)


def test_index_masks_and_dtypes() -> None:
    x = torch.arange(24).reshape(4, 6)
    mask = x % 5 == 0
    same(call("aoti_torch_cpu_index_Tensor", x, OptHandles([mask]), returns=1), x[mask])
    small = torch.tensor([1, 0], dtype=torch.int32)
    same(call("aoti_torch_cpu_index_Tensor", x, OptHandles([None, small]), returns=1), x[:, small])
    empty = torch.zeros(0, dtype=torch.int64)
    same(call("aoti_torch_cpu_index_Tensor", x, OptHandles([empty]), returns=1), x[empty])
    for dtype in (torch.bool, torch.float16, torch.complex64):
        y = x.to(dtype)
        got = call("aoti_torch_cpu_index_put", y, OptHandles([mask]), torch.tensor(1, dtype=dtype), True, returns=1)
        same(got, torch.ops.aten.index_put(y, [mask], torch.tensor(1, dtype=dtype), True))


def test_a_large_gather_is_parallel_and_right() -> None:
    x = torch.rand(1000, 96)
    index = torch.randint(0, 1000, (700,))
    same(call("aoti_torch_cpu_index_Tensor", x, OptHandles([index]), returns=1), x[index])
    same(call("aoti_torch_cpu_index_Tensor", x.t(), OptHandles([None, index]), returns=1), x.t()[:, index])


def test_index_errors() -> None:
    x, bad = torch.zeros(3, 4), torch.tensor([0, 4])
    text = "index: index 4 is out of bounds for dimension 1 with size 4"
    with pytest.raises(ShimError, match=text):
        call("aoti_torch_cpu_index_Tensor", x, OptHandles([None, bad]), returns=1)
    with pytest.raises(ShimError, match="index_put: index 4 is out of bounds for dimension 0 with size 3"):
        call("aoti_torch_index_put_out", x, x, Handles([bad]), I32(1), torch.ones(2, 4), False)
    assert not x.any()
    with pytest.raises(ShimError, match=r"the mask of shape \[4\] at dimension 0 does not match"):
        call("aoti_torch_cpu_index_Tensor", x, OptHandles([torch.ones(4, dtype=torch.bool)]), returns=1)
    with pytest.raises(ShimError, match="index: too many indices: 3 for a 2-D tensor"):
        call("aoti_torch_cpu_index_Tensor", x, OptHandles([bad, bad, bad]), returns=1)
    with pytest.raises(ShimError, match="must be int64, int32, bool or uint8, got float32"):
        call("aoti_torch_cpu_index_Tensor", x, OptHandles([torch.zeros(2)]), returns=1)
    with pytest.raises(ShimError, match="index_put: 'values' is float64, expected float32 as 'self'"):
        call(
            "aoti_torch_cpu_index_put",
            x,
            OptHandles([torch.tensor([0, 1])]),
            torch.ones(2, 4).double(),
            False,
            returns=1,
        )
    eight = torch.zeros(3, dtype=torch.float8_e4m3fn)
    with pytest.raises(ShimError, match="index_put: dtype float8_e4m3fn cannot be accumulated"):
        call("aoti_torch_cpu_index_put", eight, OptHandles([torch.tensor([0])]), eight[:1], I32(1), returns=1)


@pytest.mark.parametrize("name", ["aoti_torch_cpu_nonzero", "aoti_torch_nonzero"])
def test_nonzero(name: str) -> None:
    for x in (torch.eye(3), torch.tensor(2.0), torch.tensor(0), torch.zeros(3, 2), torch.zeros(0, 4),
              torch.randint(0, 2, (3, 4, 2)).bool().transpose(0, 2), torch.tensor([float("nan"), -0.0])):  # fmt: skip
        same(call(name, x, returns=1), torch.nonzero(x))


def test_nonzero_static() -> None:
    x = torch.tensor([[1, 0], [2, 3]])
    for size in (0, 2, 5):
        same(
            call("aoti_torch_cpu_nonzero_static", x, size, -7, returns=1),
            torch.nonzero_static(x, size=size, fill_value=-7),
        )


def test_masked_select_and_scatter() -> None:
    x = torch.rand(4, 1, 3).transpose(0, 2)
    mask = torch.rand(3, 5, 1) > 0.5
    same(call("aoti_torch_cpu_masked_select", x, mask, returns=1), torch.masked_select(x, mask))
    source = torch.rand(100)
    same(
        call("aoti_torch_cpu_masked_scatter", x, mask, source, returns=1), torch.masked_scatter(x, mask, source), False
    )
    with pytest.raises(ShimError, match="masked_scatter: the mask sets 6 elements, but 'source' has only 2"):
        call(
            "aoti_torch_cpu_masked_scatter",
            torch.zeros(2, 3),
            torch.ones(2, 3, dtype=torch.bool),
            source[:2],
            returns=1,
        )
    with pytest.raises(ShimError, match="masked_select: 'mask' must be bool, got int64"):
        call("aoti_torch_cpu_masked_select", x, torch.ones(1, dtype=torch.int64), returns=1)


@pytest.mark.parametrize("name", ["aoti_torch_cpu_repeat_interleave_Tensor", "aoti_torch_repeat_interleave_Tensor"])
def test_repeat_interleave(name: str) -> None:
    for dtype in (torch.int64, torch.int32):
        repeats = torch.tensor([2, 0, 3], dtype=dtype)
        same(call(name, repeats, Opt(None), returns=1), torch.repeat_interleave(repeats))
        same(call(name, repeats, Opt(5, "int64"), returns=1), torch.repeat_interleave(repeats))
    with pytest.raises(ShimError, match="repeat_interleave: 'output_size' is 4, but the repeats sum to 5"):
        call(name, repeats, Opt(4, "int64"), returns=1)
    with pytest.raises(ShimError, match="'repeats' holds -1 at 1, expected no negative count"):
        call(name, torch.tensor([1, -1]), Opt(None), returns=1)
    with pytest.raises(ShimError, match="repeat_interleave: 'output_size' is -1, expected 0 or more"):
        call(name, repeats, Opt(-1, "int64"), returns=1)
    with pytest.raises(ShimError, match="repeat_interleave: 'repeats' is float32, expected int32 or int64"):
        call(name, torch.ones(2), Opt(None), returns=1)


def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    out: torch.Tensor = call("aoti_torch_cpu_cat", Handles(tensors), len(tensors), dim, returns=1)
    return out


def test_cat() -> None:
    a, b = torch.rand(2, 3, 4), torch.rand(2, 1, 4)
    same(cat([a, b], 1), torch.cat([a, b], 1))
    same(cat([a, torch.empty(0), b], -2), torch.cat([a, torch.empty(0), b], -2))
    same(cat([a, b.long()], 1), torch.cat([a, b.long()], 1))
    images = [torch.rand(2, c, 4, 5).to(memory_format=torch.channels_last) for c in (3, 2)]
    same(cat(images, 1), torch.cat(images, 1))
    same(cat([torch.empty(0)], 0), torch.empty(0))
    with pytest.raises(
        ShimError, match=r"cat: tensor 1 has shape \[2, 1, 4\], expected \[2, 3, 4\] except in dimension 0"
    ):
        cat([a, b], 0)
    with pytest.raises(ShimError, match="cat: tensor 0 is 0-D and cannot be concatenated"):
        cat([torch.tensor(1.0)], 0)


@pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous")  # on purpose: the strides are compared
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16])
def test_searchsorted_and_bucketize(dtype: torch.dtype, right: bool) -> None:
    edges = torch.tensor([1, 3, 3, 5, 9]).to(dtype)
    values = torch.tensor([[0, 1, 3], [4, 9, 10]]).to(dtype).t()
    got = call("aoti_torch_cpu_bucketize_Tensor", values, edges, True, right, returns=1)
    same(got, torch.bucketize(values, edges, out_int32=True, right=right))
    got = call("aoti_torch_cpu_searchsorted_Tensor", edges, values, False, right, None, None, returns=1)
    same(got, torch.searchsorted(edges, values, right=right))
    rows = torch.stack([edges, edges + 2])
    wanted = torch.tensor([[2, 3], [5, 6]]).to(dtype)
    got = call("aoti_torch_cpu_searchsorted_Tensor", rows, wanted, False, right, None, None, returns=1)
    same(got, torch.searchsorted(rows, wanted, right=right))
    shuffled = torch.tensor([5, 1, 9, 3]).to(dtype)
    sorter = torch.argsort(shuffled)
    got = call("aoti_torch_cpu_searchsorted_Tensor", shuffled, values, False, right, None, Opt(sorter), returns=1)
    same(got, torch.searchsorted(shuffled, values, right=right, sorter=sorter))
    got = call("aoti_torch_cpu_searchsorted_Scalar", edges, 3.0, False, right, None, None, returns=1)
    same(got, torch.searchsorted(edges, 3.0, right=right))
    nan = call("aoti_torch_cpu_bucketize_Tensor", torch.tensor([float("nan")]), edges.float(), False, right, returns=1)
    assert nan.item() == 5
    with pytest.raises(ShimError, match="'sorter' holds [4-7], expected 0 to 3"):
        call("aoti_torch_cpu_searchsorted_Tensor", shuffled, values, False, right, None, Opt(sorter + 4), returns=1)


def test_histograms() -> None:
    import ctypes

    x = torch.randn(500)
    for low, high in ((0.0, 0.0), (-1.0, 1.0)):
        same(call("aoti_torch_cpu_histc", x, 7, low, high, returns=1), torch.histc(x, 7, low, high))
    same(call("aoti_torch_cpu_histc", torch.ones(3), 4, 0.0, 0.0, returns=1), torch.histc(torch.ones(3), 4))
    for density in (False, True):
        weight = torch.rand(500)
        hist, edges = call("aoti_torch_cpu_histogram_bin_ct", x, 9, None, 0, Opt(weight), density, returns=2)
        expected = torch.histogram(x, 9, weight=weight, density=density)
        torch.testing.assert_close(hist, expected.hist)
        torch.testing.assert_close(edges, expected.bin_edges)
        points = torch.rand(300, 2)
        got = call("aoti_torch_cpu__histogramdd_from_bin_cts", points, [3, 4], None, 0, None, density, returns=1)
        torch.testing.assert_close(got, torch.histogramdd(points, [3, 4], density=density).hist)
    limits = (ctypes.c_double * 2)(-1.0, 0.5)
    pointer = ctypes.pointer(limits)
    h, slots = handle(x), [ctypes.c_void_p(), ctypes.c_void_p()]
    raise_on(lib.aoti_torch_cpu_histogram_bin_ct(
        h, ctypes.c_int64(6), ctypes.byref(pointer), ctypes.c_int64(2), None, 0, *map(ctypes.byref, slots)))  # fmt: skip
    torch.testing.assert_close(to_torch(slots[0]), torch.histogram(x, 6, range=(-1.0, 0.5)).hist)
    for each in (h, *slots):
        delete(each)
    with pytest.raises(ShimError, match=r"histc: range \[nan, nan\] is not finite"):
        call("aoti_torch_cpu_histc", torch.tensor([1.0, float("nan")]), 4, 0.0, 0.0, returns=1)
    with pytest.raises(ShimError, match="histc: dtype int64 is not supported, expected float32 or float64"):
        call("aoti_torch_cpu_histc", torch.tensor([1]), 4, 0.0, 0.0, returns=1)
    with pytest.raises(ShimError, match=r"histc: range \[0, inf\] is not finite"):
        call("aoti_torch_cpu_histc", x, 4, 0.0, math.inf, returns=1)
    with pytest.raises(ShimError, match="histc: 'max' is 1, expected more than 'min' 2"):
        call("aoti_torch_cpu_histc", x, 4, 2.0, 1.0, returns=1)


X = torch.arange(24.0).reshape(2, 3, 4)
VIEWS: list[tuple[str, tuple[Any, ...], torch.Tensor]] = [
    ("narrow", (X, 2, -3, 2), X.narrow(2, -3, 2)),
    ("slice_Tensor", (X, 1, Opt(-2, "int64"), Opt(100, "int64"), 2), X[:, -2:100:2]),
    ("slice_Tensor", (X, 0, Opt(None), Opt(None), 1), X),
    ("slice_Tensor", (X, 0, Opt(2, "int64"), Opt(1, "int64"), 1), X[2:1]),
    ("permute", (X, [2, -3, 1]), X.permute(2, 0, 1)),
    ("reshape", (X, [6, -1]), X.reshape(6, -1)),
    ("reshape", (X.permute(2, 0, 1), [4, 6]), X.permute(2, 0, 1).reshape(4, 6)),
    ("reshape", (X.permute(1, 0, 2), [6, 4]), X.permute(1, 0, 2).reshape(6, 4)),
    ("reshape", (torch.tensor(3.0), [1, 1]), torch.tensor([[3.0]])),
    ("squeeze_dim", (X[:, :1], 1), X[:, 0]),
    ("squeeze_dim", (X, 1), X),
    ("view_dtype", (X, I32(CODES[torch.int32])), X.view(torch.int32)),
    ("view_dtype", (X, I32(CODES[torch.float16])), X.view(torch.float16)),
    ("view_dtype", (X, I32(CODES[torch.complex64])), X.view(torch.complex64)),
    ("view_as_complex", (X.reshape(3, 4, 2),), torch.view_as_complex(X.reshape(3, 4, 2))),
    ("view_as_real", (torch.tensor([1 + 2j, 3j]),), torch.tensor([[1.0, 2.0], [0.0, 3.0]])),
]


@pytest.mark.parametrize(("name", "args", "expected"), VIEWS)
def test_views(name: str, args: tuple[Any, ...], expected: torch.Tensor) -> None:
    got = call(f"aoti_torch_cpu_{name}", *args, returns=1)
    if name == "view_dtype" and expected.dtype is torch.float16:
        got, expected = got.view(torch.int16), expected.view(torch.int16)  # bit patterns, some of them NaN
    same(got, expected.clone())  # the harness copies a view that is not dense, as clone does


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("narrow", (X, 0, 1, 2), "narrow: start 1 and length 2 leave dimension 0 of size 2"),
        ("slice_Tensor", (X, 0, Opt(None), Opt(None), 0), "slice: 'step' is 0, expected 1 or more"),
        ("permute", (X, [0, 0, 1]), r"permute: dimension 0 appears twice in \[0, 0, 1\]"),
        ("reshape", (X, [5, -1]), r"reshape: shape \[5, -1\] does not fit 24 elements"),
        ("view_dtype", (torch.zeros(3), I32(CODES[torch.float64])), "the last dimension's size 3 is no multiple of 2"),
        ("view_as_complex", (X,), r"the last dimension must have size 2, got shape \[2, 3, 4\]"),
        ("view_as_real", (X,), "view_as_real: 'self' is float32, expected a complex dtype"),
    ],
)
def test_view_errors(name: str, args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ShimError, match=text):
        call(f"aoti_torch_cpu_{name}", *args, returns=1)


def test_resize_and_set() -> None:
    import ctypes

    x = torch.arange(6.0)
    h, other = handle(x), handle(X)
    size = (ctypes.c_int64 * 2)(2, 4)
    raise_on(lib.aoti_torch_cpu_resize_(h, size, ctypes.c_int64(2), None))
    grown = to_torch(h)
    assert grown.shape == (2, 4) and torch.equal(grown.flatten()[:6], x)
    raise_on(lib.aoti_torch_cpu_resize_as_(h, other, None))
    assert to_torch(h).shape == X.shape
    raise_on(lib.aoti_torch_cpu_set__source_Tensor(h, other))
    assert torch.equal(to_torch(h), X)
    delete(h)
    delete(other)
