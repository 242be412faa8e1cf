"""NVFP4 MoE (fused experts) on the GPU, against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.again import run_again
from tests.gpu.native.captured import captured
from tests.gpu.native.faults import fault_of
from tests.native.nvfp4_experts import (
    NAMES,
    ROUNDING,
    SILU,
    SwiGLU,
    in_float64,
    moe_refusals,
    random_experts,
    random_routing,
    random_swiglu,
)
from tests.native.nvfp4_weights import BF16, F16, F32
from tests.native.shim import (
    ShimError,
    call,
    delete,
    handle,
    lib,
    raise_on,
    use_torch_stream,
)

MOE = "aoti_torch_cuda_nvfp4_moe"
QWEN3_30B = (128, 2048, 768, 8)  # experts, k, width, top_k
GPT_OSS_20B = (32, 2880, 2880, 4)


def moe(*args: torch.Tensor, swiglu: SwiGLU = SILU) -> torch.Tensor:
    got: torch.Tensor = call(MOE, *(arg.cuda() for arg in args), *swiglu.cuda().arguments(), returns=1)
    return got


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((m, k), generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor, swiglu: SwiGLU = SILU) -> None:
    """float16 and bfloat16 round act as well as the result; accumulation is in float32."""
    assert (got.shape, got.dtype, got.is_contiguous()) == (x.shape, x.dtype, True)
    want, size, relative, absolute = in_float64(x.cuda(), *(tensor.cuda() for tensor in rest), swiglu=swiglu.cuda())
    rounding = ROUNDING[x.dtype]
    between = torch.zeros(()) if x.dtype == F32 else relative * rounding + absolute
    least = torch.finfo(x.dtype).smallest_normal * rounding
    error = (got.double() - want).abs()
    assert torch.all(error <= want.abs() * rounding + between.to(want.device) + size * 2.0**-17 + least)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 130, 300, 1025])
def test_every_number_of_tokens(m: int, dtype: torch.dtype) -> None:
    for e, k, width, top_k in [(8, 512, 192, 2), (64, 256, 128, 6)]:
        x = rows(m, k, dtype)
        rest = (*random_routing(m, top_k, e), *random_experts(e, k, width, False))
        check(moe(x, *rest), x, *rest)


@pytest.mark.parametrize("m", [1, 4, 64, 200])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 16, 16, 1), (2, 2048, 16, 1), (3, 48, 80, 3), (5, 272, 176, 2), (8, 16, 2048, 4), (4, 1408, 704, 4),
        (16, 544, 96, 16), (256, 128, 64, 8), (257, 64, 32, 10), (700, 32, 16, 3), (3, 7168, 64, 2),
    ],
)  # fmt: skip
def test_sizes(shape: tuple[int, int, int, int], m: int) -> None:
    e, k, width, top_k = shape
    for dtype in (BF16, F16, F32):
        x, rest = rows(m, k, dtype), (*random_routing(m, top_k, e), *random_experts(e, k, width, True))
        check(moe(x, *rest), x, *rest)


@functools.cache
def weights_of(e: int, k: int, width: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cuda() for tensor in random_experts(e, k, width, False))


@pytest.mark.parametrize("m", [1, 16, 64, 256, 2048])
def test_qwen3_30b(m: int) -> None:
    e, k, width, top_k = QWEN3_30B
    x, rest = rows(m, k, BF16), (*random_routing(m, top_k, e), *weights_of(e, k, width))
    check(moe(x, *rest), x, *rest)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 16, 64, 256, 2048])
def test_gpt_oss_20b(m: int, dtype: torch.dtype) -> None:
    e, k, width, top_k = GPT_OSS_20B
    swiglu = random_swiglu(e, k, width)
    x, rest = rows(m, k, dtype), (*random_routing(m, top_k, e), *weights_of(e, k, width))
    got = moe(x, *rest, swiglu=swiglu)
    check(got, x, *rest, swiglu=swiglu)
    # Bounds of long sums say little where gates are cut off: all errors together do.
    want, *_ = in_float64(x.cuda(), *(tensor.cuda() for tensor in rest), swiglu=swiglu.cuda())
    assert (got.double() - want).norm() <= {BF16: 1e-2, F16: 2e-3, F32: 1e-4}[dtype] * want.norm()


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 130, 300, 1025])
def test_biases_and_activations(m: int, dtype: torch.dtype) -> None:
    """Widths that end within a tile, and within a group of 64."""
    for e, k, width, top_k in [(8, 512, 192, 2), (64, 272, 144, 6), (3, 48, 80, 2), (4, 2048, 16, 1)]:
        x, rest = rows(m, k, dtype), (*random_routing(m, top_k, e, low=-1), *random_experts(e, k, width, True))
        every = random_swiglu(e, k, width, limit=2.0)
        for swiglu in (
            every,
            SwiGLU(every.w13_bias, every.w2_bias),
            SwiGLU(every.w13_bias),
            SwiGLU(None, every.w2_bias, limit=0.5),
            SwiGLU(alpha=-0.5, beta=-2.5),
        ):
            check(moe(x, *rest, swiglu=swiglu), x, *rest, swiglu=swiglu)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 12, 40, 100, 700])
def test_biases_of_zero_are_none(m: int, dtype: torch.dtype) -> None:
    e, k, width, top_k = 6, 256, 96, 3
    args = rows(m, k, dtype), *random_routing(m, top_k, e), *random_experts(e, k, width, True)
    zeros = SwiGLU(torch.zeros(e, 2 * width), torch.zeros(e, k), limit=math.inf)
    assert torch.equal(moe(*args, swiglu=zeros), moe(*args))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [2, 12, 40, 100, 700])
def test_numbers_that_are_not_finite(m: int, dtype: torch.dtype) -> None:
    """A limit bounds infinities and leaves NaN, as torch.clamp does."""
    e, k, width = 2, 64, 96
    every = random_swiglu(e, k, width)
    every.w13_bias[0, 3] = torch.nan
    every.w13_bias[1, :5], every.w13_bias[1, -5:] = torch.inf, -torch.inf
    ids = (torch.arange(m, dtype=torch.int32) % 2)[:, None]
    x, rest = rows(m, k, dtype), (torch.ones(m, 1), ids, *random_experts(e, k, width, False))
    got = moe(x, *rest, swiglu=every)
    want, *_ = in_float64(x, *rest, swiglu=every)
    assert got[0::2].isnan().all() and want[1::2].isfinite().all()
    size = float(want[1::2].abs().max())
    torch.testing.assert_close(
        got[1::2].cpu().double(), want[1::2], rtol=0, atol=2 * ROUNDING[dtype] * size + 1e-5 * size
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 20, 150, 700])
@pytest.mark.parametrize("routing", ["one expert", "two experts", "some elsewhere", "all elsewhere", "the same twice"])
def test_routing(routing: str, m: int, dtype: torch.dtype) -> None:
    e, k, width, top_k = 12, 256, 96, 4
    factors, ids = random_routing(m, top_k, e, low=-1 if routing == "some elsewhere" else 0)
    if routing == "one expert":
        ids[:] = 7
    elif routing == "two experts":
        ids[:] = torch.tensor([11, 0, 11, 0])
    elif routing == "all elsewhere":
        ids[:] = -1
    elif routing == "the same twice":
        ids[:, 1] = ids[:, 0]
    x, rest = rows(m, k, dtype), (factors, ids, *random_experts(e, k, width, True))
    got = moe(x, *rest)
    check(got, x, *rest)
    if routing == "all elsewhere":
        assert not got.any()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_nothing_to_do(dtype: torch.dtype) -> None:
    weights = random_experts(4, 64, 32, False)
    assert moe(rows(0, 64, dtype), *random_routing(0, 2, 4), *weights).shape == (0, 64)
    assert not moe(rows(3, 64, dtype), *random_routing(3, 0, 4), *weights).any()
    none = random_experts(0, 64, 32, False)
    assert not moe(rows(3, 64, dtype), torch.ones(3, 2), torch.full((3, 2), -1).int(), *none).any()


def test_more_tokens_than_one_launch_takes() -> None:
    """The results of pairs, 64 KiB a token, are more than what is kept at a time."""
    m, e, k, width, top_k = 5000, 4, 1024, 16, 16
    x, rest = rows(m, k, BF16), (*random_routing(m, top_k, e, low=-1), *random_experts(e, k, width, True))
    check(moe(x, *rest), x, *rest)


@pytest.mark.parametrize("mean", [-1, 100000])
def test_other_kernels(mean: int) -> None:
    """The same tests where the sm_90 GEMM serves every M, or none, as on other GPUs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has one kind of kernel")
    selected = (
        "test_every_number_of_tokens or test_sizes or test_qwen3_30b or test_gpt_oss_20b or test_routing or "
        "test_the_same_bits or test_biases or test_numbers_that_are_not_finite"
    )
    run_again(__file__, selected, NVFP4_MOE_SM80_MEAN=mean)


@pytest.mark.parametrize("m", [1, 60])
def test_memory_that_is_not_aligned(m: int) -> None:
    x, rest = rows(m, 128, BF16), (*random_routing(m, 2, 4), *random_experts(4, 128, 64, False))
    swiglu = random_swiglu(4, 128, 64)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view(tensor.shape).copy_(tensor)

    there = dataclasses.replace(swiglu, w13_bias=moved(swiglu.w13_bias), w2_bias=moved(swiglu.w2_bias))
    got = call(MOE, moved(x), *(moved(tensor) for tensor in rest), *there.arguments(), returns=1)
    check(got, x, *rest, swiglu=swiglu)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nvfp4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, top_k = draw(st.sampled_from([1, 2, 3, 8, 31, 128, 300])), draw(st.integers(1, 10))
    k, width = 16 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 20))
    m = draw(st.integers(0, 10) | st.integers(0, 300))
    dtype, seed = draw(st.sampled_from([BF16, F16, F32])), draw(st.integers(0, 99))
    rest = (
        *random_routing(m, top_k, e, draw(st.sampled_from([-1, 0])), seed),
        *random_experts(e, k, width, draw(st.booleans()), seed),
    )
    match draw(st.sampled_from(["rows", "wide", "offset", "repeated", "every second"])):
        case "wide":
            x = rows(m, k + 8, dtype, seed).cuda()[:, :k]
        case "offset":
            x = rows(m, k + 3, dtype, seed).cuda()[:, 3:]
        case "repeated":
            x = rows(1, k, dtype, seed).cuda().expand(m, k)
        case "every second":
            x = rows(2 * m, k, dtype, seed).cuda()[::2]
        case _:
            x = rows(m, k, dtype, seed).cuda()
    swiglu = SILU
    if draw(st.booleans()):
        alpha, beta = draw(st.sampled_from([1.0, 1.702, -0.5])), draw(st.sampled_from([0.0, 1.0, -2.5]))
        limit = draw(st.sampled_from([None, 0.5, 7.0]))
        swiglu = random_swiglu(e, k, width, seed=seed, alpha=alpha, beta=beta, limit=limit)
        for name in draw(st.sets(st.sampled_from(["w13_bias", "w2_bias"]))):
            swiglu = dataclasses.replace(swiglu, **{name: None})
    check(moe(x, *rest, swiglu=swiglu), x, *rest, swiglu=swiglu)


@pytest.mark.parametrize("m", [1, 8, 40, 150, 700])
def test_the_same_bits_every_time(m: int) -> None:
    args = [rows(m, 512, BF16), *random_routing(m, 4, 8), *random_experts(8, 512, 256, False)]
    on_gpu = [arg.cuda() for arg in args]
    for swiglu in (SILU, random_swiglu(8, 512, 256).cuda()):
        first = call(MOE, *on_gpu, *swiglu.arguments(), returns=1)
        for _ in range(20):
            assert torch.equal(call(MOE, *on_gpu, *swiglu.arguments(), returns=1), first)


# SiLU's arguments for a call with handles.
NO_SWIGLU = (None, None, ctypes.c_double(1.0), ctypes.c_double(0.0), None)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("m", [1, 16, 100])
def test_in_a_graph(m: int, dtype: torch.dtype) -> None:
    """Captured on its first call, replayed with other rows and another routing in the same places."""
    args = [rows(m, 256, dtype), *random_routing(m, 3, 9), *random_experts(9, 256, 128, True)]
    on_gpu = [arg.cuda() for arg in args]
    x, factors, ids = on_gpu[:3]
    out = torch.empty(m, 256, dtype=dtype, device="cuda")
    with captured(MOE, on_gpu, NO_SWIGLU, out) as graph:
        for seed in (1, 2, 3):
            x.copy_(rows(m, 256, dtype, seed))
            other_factors, other_ids = random_routing(m, 3, 9, low=-1, seed=seed)
            if seed == 3:
                other_ids[:] = 8  # all of them
            factors.copy_(other_factors)
            ids.copy_(other_ids)
            graph.replay()
            torch.cuda.synchronize()
            check(out, *on_gpu)


@pytest.mark.parametrize("m", [1, 30, 300])
def test_on_streams_side_by_side(m: int) -> None:
    weights = [tensor.cuda() for tensor in random_experts(16, 512, 256, False)]
    inputs = [[rows(m, 512, BF16, i).cuda(), *(t.cuda() for t in random_routing(m, 4, 16, seed=i))] for i in range(4)]
    want = [call(MOE, *rest, *weights, *SILU.arguments(), returns=1) for rest in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got: list[torch.Tensor] = []
    for stream, rest in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            use_torch_stream()
            for _ in range(5):
                result = call(MOE, *rest, *weights, *SILU.arguments(), returns=1)
            got.append(result)
    use_torch_stream()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("wrong", [-2, 4, 2**31 - 1, -(2**31)])
def test_ids_of_no_expert(wrong: int, dtype: torch.dtype) -> None:
    """The next call tells, and they count as -1 meanwhile."""
    m = 70
    x, (factors, ids), weights = rows(m, 64, dtype), random_routing(m, 3, 4), random_experts(4, 64, 32, False)
    ids[m - 1, 1] = wrong
    args = [tensor.cuda() for tensor in (x, factors, ids, *weights)]
    text = f"nvfp4_moe: argument 'topk_ids' holds {wrong}, which is no expert; pass their numbers from 0 on, or -1"
    assert text in fault_of(MOE, *args, *SILU.arguments(), returns=1)
    out = torch.full((m, 64), torch.nan, dtype=dtype, device="cuda")
    owned = [handle(tensor) for tensor in (out, *args)]
    made = ctypes.c_void_p()
    raise_on(lib.aoti_torch_cuda_nvfp4_moe(*owned[1:], *NO_SWIGLU, ctypes.byref(made)))
    torch.cuda.synchronize()
    with pytest.raises(ShimError, match="which is no expert"):
        call("aoti_torch_cuda_abs", torch.ones(3, device="cuda"), returns=1)
    raise_on(lib.aoti_torch_copy_(owned[0], made, ctypes.c_int32(0)))
    torch.cuda.synchronize()
    for h in [*owned, made]:
        delete(h)
    check(out, x, factors, ids, *weights)


def test_refusals_launch_nothing() -> None:
    def on_gpu(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    for refused, expected in moe_refusals(on_gpu):
        with pytest.raises(ShimError) as error:
            call(MOE, *refused, returns=1)
        assert str(error.value) == expected
    x, rest = rows(3, 32, BF16), (*random_routing(3, 2, 4), *random_experts(4, 32, 32, False))
    for place, name in enumerate(NAMES):
        args = [tensor if i == place else tensor.cuda() for i, tensor in enumerate((x, *rest))]
        with pytest.raises(ShimError, match=f"argument '{name}' is on cpu, expected cuda"):
            call(MOE, *args, *SILU.arguments(), returns=1)
    on_cpu = random_swiglu(4, 32, 32)
    for name in ("w13_bias", "w2_bias"):
        swiglu = dataclasses.replace(on_cpu.cuda(), **{name: getattr(on_cpu, name)})
        with pytest.raises(ShimError, match=f"argument '{name}' is on cpu, expected cuda"):
            call(MOE, *(tensor.cuda() for tensor in (x, *rest)), *swiglu.arguments(), returns=1)
    check(moe(x, *rest), x, *rest)
