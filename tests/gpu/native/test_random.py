"""The random shims on the GPU: torch's own numbers where they are promised, distributions elsewhere."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from tests.gpu.native.faults import fault_of
from tests.native.shim import CODES, I32, Opt, ShimError, call, lib, use_torch_stream

CUDA = Opt(1, "int32")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
# One element, less than a block, more than one round of a grid on any GPU.
SHAPES: list[list[int]] = [[], [1], [3, 0], [1000], [37, 41], [3_000_017]]


def options(dtype: torch.dtype | None) -> list[Any]:
    return [Opt(None if dtype is None else CODES[dtype], "int32"), None, CUDA, I32(0), None]


def like_options(dtype: torch.dtype | None = None) -> list[Any]:
    return [*options(dtype), None]


def seed(value: int = 42) -> None:
    torch.manual_seed(value)
    lib.untorch_manual_seed(ctypes.c_uint64(value))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rand_and_randn_are_torchs(dtype: torch.dtype, shape: list[int]) -> None:
    seed(2**40 + 7)
    for _ in range(3):  # the position moves on as torch's does
        got = call("aoti_torch_cuda_rand", shape, *options(dtype), returns=1)
        torch.testing.assert_close(got, torch.rand(shape, dtype=dtype, device="cuda"))
        got = call("aoti_torch_cuda_randn", shape, *options(dtype), returns=1)
        # Sine and logarithm may differ in the last bit, which a half type may round either way.
        rtol = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}.get(dtype, 2e-3)
        torch.testing.assert_close(got, torch.randn(shape, dtype=dtype, device="cuda"), rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("high", [1, 10, 2**28 - 1, 2**28, 2**31, 2**40])
def test_randint_is_torchs(high: int) -> None:
    for n in (100, 1_000_003):
        seed()
        got = call("aoti_torch_cuda_randint", high, [n], *options(None), returns=1)
        assert torch.equal(got, torch.randint(high, (n,), device="cuda"))
        got = call("aoti_torch_cuda_randint_low", -high, high, [n], *options(None), returns=1)
        assert torch.equal(got, torch.randint(-high, high, (n,), device="cuda"))
        out = torch.empty(n, dtype=torch.int64, device="cuda")
        call("aoti_torch_cuda_randint_low_out", out, -(2**62), 2**62, [n])
        assert torch.equal(out, torch.randint(-(2**62), 2**62, (n,), device="cuda"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.float16, torch.bool])
def test_randint_dtypes(dtype: torch.dtype) -> None:
    seed()
    high = 2 if dtype is torch.bool else 100
    got = call("aoti_torch_cuda_randint", high, [5000], *options(dtype), returns=1)
    assert torch.equal(got, torch.randint(high, (5000,), dtype=dtype, device="cuda"))


def test_like_keeps_the_layout() -> None:
    x = torch.zeros(4, 6, 5, device="cuda").permute(2, 0, 1)
    seed()
    got = call("aoti_torch_cuda_rand_like", x, *like_options(), returns=1)
    torch.testing.assert_close(got, torch.rand_like(x))
    assert got.stride() == x.stride()
    got = call("aoti_torch_cuda_randn_like", x, *like_options(torch.float64), returns=1)
    torch.testing.assert_close(got, torch.randn_like(x, dtype=torch.float64))
    got = call("aoti_torch_cuda_randint_like_low_dtype", x, 3, 9, *like_options(torch.int32), returns=1)
    assert torch.equal(got, torch.randint_like(x, 3, 9, dtype=torch.int32))
    got = call("aoti_torch_cuda_randint_like", x, 9, *like_options(), returns=1)
    assert torch.equal(got, torch.randint_like(x, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_uniform_normal_exponential_bernoulli_are_torchs(dtype: torch.dtype) -> None:
    x = torch.zeros(100_003, dtype=dtype, device="cuda")
    seed()
    got = call("aoti_torch_cuda_uniform", x, -2.0, 3.0, None, returns=1)
    torch.testing.assert_close(got, x.clone().uniform_(-2, 3))
    got = call("aoti_torch_cuda_normal_functional", x, 1.5, 0.25, None, returns=1)
    torch.testing.assert_close(got, x.clone().normal_(1.5, 0.25), rtol=2e-3, atol=1e-4)
    got = call("aoti_torch_cuda_exponential", x, 2.0, None, returns=1)
    torch.testing.assert_close(got, x.clone().exponential_(2.0), rtol=2e-3, atol=1e-5)
    got = x.clone()
    call("aoti_torch_cuda_bernoulli__float", got, 0.3, None)
    assert torch.equal(got, x.clone().bernoulli_(0.3))


def test_bernoulli_tensor() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        p = torch.tensor([0.0, 1.0, 0.25, 0.75], device="cuda").to(dtype)
        for out_dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.float64):
            out = torch.empty(40_000, 4, dtype=out_dtype, device="cuda")
            call("aoti_torch_cuda_bernoulli__Tensor", out, p, None)
            mean = out.double().mean(0).cpu()
            assert mean[0] == 0 and mean[1] == 1
            torch.testing.assert_close(mean[2:], torch.tensor([0.25, 0.75], dtype=torch.float64), rtol=0, atol=0.015)
    assert "bernoulli_: 'p' holds a value outside of 0 to 1" in fault_of(
        "aoti_torch_cuda_bernoulli__Tensor", out, p * 2, None
    )


@pytest.mark.parametrize("n", [0, 1, 2, 1000, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_randperm(n: int, dtype: torch.dtype) -> None:
    seed()
    got = call("aoti_torch_cuda_randperm", n, *options(dtype), returns=1)
    assert torch.equal(got.sort().values, torch.arange(n, dtype=dtype, device="cuda"))
    seed()
    assert torch.equal(call("aoti_torch_cuda_randperm", n, *options(dtype), returns=1), got)
    if n >= 1000:
        assert not torch.equal(call("aoti_torch_cuda_randperm", n, *options(dtype), returns=1), got)


def test_randperm_is_fair() -> None:
    seed()
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(6000):
        order = tuple(call("aoti_torch_cuda_randperm", 3, *options(torch.int32), returns=1).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 25  # chi-square, 5 degrees of freedom


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_dropout(dtype: torch.dtype) -> None:
    x = (torch.rand(300, 1000, device="cuda") + 0.5).to(dtype).t()
    out, mask = call("aoti_torch_cuda_native_dropout", x, 0.3, Opt(1, "int32"), returns=2)
    assert mask.dtype == torch.bool and out.stride() == x.stride() == mask.stride()
    assert abs(mask.double().mean().item() - 0.7) < 0.005
    torch.testing.assert_close(out, x * mask / 0.7)
    for p, train, kept in ((0.0, None, 1), (1.0, 1, 0), (0.5, 0, 1)):
        out, mask = call("aoti_torch_cuda_native_dropout", x, p, Opt(train, "int32"), returns=2)
        assert bool((mask == bool(kept)).all())
        torch.testing.assert_close(out, x * kept)


def test_same_seed_same_numbers_and_independence() -> None:
    seed(7)
    first = [call("aoti_torch_cuda_rand", [50_000], *options(None), returns=1) for _ in range(2)]
    seed(7)
    assert torch.equal(call("aoti_torch_cuda_rand", [50_000], *options(None), returns=1), first[0])
    assert not torch.equal(*first)
    correlation = torch.corrcoef(torch.stack(first))[0, 1].item()
    assert abs(correlation) < 6 / math.sqrt(50_000)


def test_a_callers_capture_is_refused() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(10, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    text = "rand_like: the stream is being captured .*method.graph"
    with torch.cuda.stream(stream):
        use_torch_stream()
        graph.capture_begin()
        try:
            with pytest.raises(ShimError, match=text):
                call("aoti_torch_cuda_rand_like", x, *like_options(), returns=1)
            x.add_(1)
        finally:
            graph.capture_end()
