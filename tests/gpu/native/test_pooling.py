"""Pooling, unpooling and fractional pooling on the GPU against torch's own CUDA operators; means against float64."""

from __future__ import annotations

import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, ShimError, call

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel() > 0:
        assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def check_means(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """``exact`` in float64 and ``size``, the means of the absolute values: two orders of a long sum differ by that."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    of_the_sum = 2.0**-51 if got.dtype == torch.float64 else 2.0**-22
    assert torch.all((got.double() - exact).abs() <= exact.abs() * torch.finfo(got.dtype).eps + size * of_the_sum)


def draw_input(data: st.DataObject, n: int, low: int = 4) -> torch.Tensor:
    draw = data.draw
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    size = [draw(st.integers(1, 3)), draw(st.integers(1, 9)), *(draw(st.integers(low, 19)) for _ in range(n))]
    x = (torch.randn(size, generator=seed) * 20).to(draw(st.sampled_from(DTYPES))).cuda()
    layout = draw(st.sampled_from(["rows", "last", "unbatched", "transposed"]))
    if layout == "last":
        x = x.to(memory_format=torch.channels_last if n == 2 else torch.channels_last_3d)
    elif layout == "unbatched":
        x = x[0]
    elif layout == "transposed":
        x = x.transpose(-1, -2)
    return x


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_avg_pool(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n, 12)
    kernel = [draw(st.sampled_from([1, 2, 3, 4, 11])) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)] if draw(st.booleans()) else []
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    divisor = draw(st.sampled_from([None, 3]))
    args = (kernel, stride, padding, draw(st.booleans()), draw(st.booleans()))
    pool = getattr(torch.ops.aten, f"avg_pool{n}d")
    want = pool(x, *args, divisor)
    got = call(f"aoti_torch_cuda_avg_pool{n}d", x, *args, Opt(divisor, "int64"), returns=1)
    check_means(got, want, pool(x.double(), *args, divisor), pool(x.double().abs(), *args, divisor))
    assert torch.equal(call(f"aoti_torch_cuda_avg_pool{n}d", x, *args, Opt(divisor, "int64"), returns=1), got)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_max_pool_with_indices(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n)
    kind = draw(st.sampled_from(["plain", "nan", "ties", "lowest"]))
    if kind == "nan":
        x[(0,) * x.dim()] = torch.nan
    elif kind == "ties":
        x = x.sign()
    elif kind == "lowest":
        x = torch.full_like(x, -torch.inf)
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)] if draw(st.booleans()) else []
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    dilation = [draw(st.integers(1, 2)) if k < 3 else 1 for k in kernel]
    args = (kernel, stride, padding, dilation, draw(st.booleans()))
    # PyTorch's channels-last kernel for the CPU has other indices, where all values are -inf. A tensor with one channel
    # is contiguous in either layout: its strides decide, and a clone has those of rows.
    rows = x.cpu().clone(memory_format=torch.contiguous_format)
    want = getattr(torch.ops.aten, f"max_pool{n}d_with_indices")(rows, *args)
    device = getattr(torch.ops.aten, f"max_pool{n}d_with_indices")(x, *args)
    got = call(f"aoti_torch_cuda_max_pool{n}d_with_indices", x, *args, returns=2)
    assert got[0].stride() == device[0].stride()
    assert got[1].stride() == device[1].stride()
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[1].cpu(), want[1])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_adaptive(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n)
    size = [draw(st.sampled_from([1, 1, 2, 3, 7])) for _ in range(n)]
    pool = getattr(torch.ops.aten, f"_adaptive_avg_pool{n}d")
    got_mean = call(f"aoti_torch_cuda__adaptive_avg_pool{n}d", x, size, returns=1)
    check_means(got_mean, pool(x, size), pool(x.double(), size), pool(x.double().abs(), size))
    if draw(st.booleans()):
        x[(0,) * x.dim()] = torch.nan
    values, indices = getattr(torch.ops.aten, f"adaptive_max_pool{n}d")(x, size)
    got = call(f"aoti_torch_cuda_adaptive_max_pool{n}d", x, size, returns=2)
    same(got[0], values)
    same(got[1], indices)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_max_unpool(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n)
    kernel = [2] * n
    values, indices = getattr(torch.ops.aten, f"max_pool{n}d_with_indices")(x, kernel, kernel)
    size = list(x.shape[-n:])
    extra = [] if n == 2 else [kernel, [0] * n]
    want = getattr(torch.ops.aten, f"max_unpool{n}d")(values, indices, size, *extra)
    same(call(f"aoti_torch_cuda_max_unpool{n}d", values, indices, size, *extra, returns=1), want)


def test_max_unpool_takes_the_last_of_equals() -> None:
    x = torch.arange(1.0, 65537.0, device="cuda").view(1, 1, 256, 256)
    index = torch.zeros(1, 1, 256, 256, dtype=torch.int64, device="cuda")
    got = call("aoti_torch_cuda_max_unpool2d", x, index, [4, 4], returns=1)
    assert got[0, 0, 0, 0].item() == 65536
    assert got.count_nonzero().item() == 1


def test_max_unpool_index_out_of_range() -> None:
    x, index = torch.ones(1, 2, 2, device="cuda"), torch.tensor([[[0, 1], [2, 99]]], device="cuda")
    texts = []
    # The call itself finds the report, or the next operator on the device does.
    for name, args in (("cuda_max_unpool2d", (x, index, [2, 2])), ("clone", (x,))):
        try:
            call(f"aoti_torch_{name}", *args, returns=1)
        except ShimError as error:
            texts.append(str(error))
        torch.cuda.synchronize()
    assert len(texts) == 1
    assert "max_unpool: index 99 is outside of output_size" in texts[0]
    assert torch.equal(call("aoti_torch_clone", x, returns=1), x)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_fractional(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n, 6)
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    size = [draw(st.integers(1, x.shape[d - n] - kernel[d] + 1)) for d in range(n)]
    batch = x.shape[0] if x.dim() == n + 2 else 1
    samples = torch.rand(batch, x.shape[-n - 1], n, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    samples = samples.clamp(max=0.99).to(x.dtype).cuda()
    try:
        want = getattr(torch.ops.aten, f"fractional_max_pool{n}d")(x.contiguous(), kernel, size, samples)
    except RuntimeError:  # torch's own bounds are narrower here
        reject()
    got = call(f"aoti_torch_cuda_fractional_max_pool{n}d", x, kernel, size, samples, returns=2)
    same(got[0], want[0])
    same(got[1], want[1])
