"""int4 MoE (fused experts) on the GPU, against float64."""

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
from tests.native.int4_experts import NAMES, Experts, moe_refusals
from tests.native.nvfp4_experts import ROUNDING, SILU, SwiGLU, random_routing, random_swiglu
from tests.native.nvfp4_weights import BF16, F16, F32
from tests.native.shim import ShimError, call, delete, handle, lib, raise_on, use_torch_stream

MOE = "aoti_torch_cuda_int4_moe"
QWEN3_30B = (128, 2048, 768, 8)  # experts, k, width, top_k
GPT_OSS_20B = (32, 2880, 2880, 4)

Routing = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def experts_of(e: int, k: int, width: int, group: int = 128, scales: torch.dtype = BF16, seed: int = 0) -> Experts:
    return Experts(e, k, width, group, scales=scales, seed=seed, device="cuda")


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((m, k), generator=torch.Generator().manual_seed(seed)).to(dtype)


def moe(x: torch.Tensor, routing: Routing, experts: Experts, swiglu: SwiGLU = SILU) -> torch.Tensor:
    on_gpu = (x.cuda(), *(tensor.cuda() for tensor in routing))
    got: torch.Tensor = call(MOE, *on_gpu, *experts.arguments(swiglu.cuda()), returns=1)
    return got


def check(got: torch.Tensor, x: torch.Tensor, routing: Routing, experts: Experts, swiglu: SwiGLU = SILU) -> None:
    """float16 and bfloat16 round weights and act as well as the result; accumulation is in float32."""
    assert (got.shape, got.dtype, got.is_contiguous()) == (x.shape, x.dtype, True)
    on_gpu = x.cuda(), *(tensor.cuda() for tensor in routing)
    want, size, relative, absolute = experts.on_gpu_in_float64(*on_gpu, swiglu.cuda())
    rounding = ROUNDING[x.dtype]
    between = torch.zeros(()) if x.dtype == F32 else relative * rounding + absolute
    least = torch.finfo(x.dtype).smallest_normal * rounding
    error = (got.double() - want).abs()
    assert torch.all(error <= want.abs() * rounding + between.to(want.device) + size * 2.0**-17 + least)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 130, 300, 1025])
def test_every_number_of_tokens(m: int, dtype: torch.dtype) -> None:
    for e, k, width, top_k, group in [(8, 512, 192, 2, 128), (64, 256, 128, 6, 32)]:
        x, routing, experts = rows(m, k, dtype), random_routing(m, top_k, e), experts_of(e, k, width, group)
        check(moe(x, routing, experts), x, routing, experts)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("m", [1, 4, 64, 200])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 16, 8, 1), (2, 2048, 16, 1), (3, 48, 80, 3), (5, 272, 176, 2), (8, 16, 2048, 4), (4, 1408, 712, 4),
        (16, 544, 96, 16), (256, 128, 64, 8), (257, 64, 32, 10), (700, 32, 16, 3), (3, 7168, 64, 2),
    ],
)  # fmt: skip
def test_sizes(shape: tuple[int, int, int, int], m: int, group: int) -> None:
    e, k, width, top_k = shape
    experts = experts_of(e, k, width, group, F32)
    for dtype in (BF16, F16, F32):
        x, routing = rows(m, k, dtype), random_routing(m, top_k, e)
        check(moe(x, routing, experts), x, routing, experts)


@pytest.mark.parametrize("m", [1, 16, 64, 256, 2048])
def test_qwen3_30b(m: int) -> None:
    e, k, width, top_k = QWEN3_30B
    x, routing, experts = rows(m, k, BF16), random_routing(m, top_k, e), experts_of(e, k, width)
    check(moe(x, routing, experts), x, routing, experts)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 16, 64, 256, 2048])
def test_gpt_oss_20b(m: int, dtype: torch.dtype) -> None:
    e, k, width, top_k = GPT_OSS_20B
    swiglu, experts = random_swiglu(e, k, width), experts_of(e, k, width)
    x, routing = rows(m, k, dtype), random_routing(m, top_k, e)
    got = moe(x, routing, experts, swiglu)
    check(got, x, routing, experts, swiglu)
    # Bounds of long sums say little where gates are cut off: all errors together do.
    want, *_ = experts.on_gpu_in_float64(x.cuda(), *(tensor.cuda() for tensor in routing), swiglu.cuda())
    assert (got.double() - want).norm() <= {BF16: 1e-2, F16: 2e-3, F32: 1e-4}[dtype] * want.norm()


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 130, 300, 1025])
def test_biases_and_activations(m: int, dtype: torch.dtype) -> None:
    """Widths that end within a tile, and within a group."""
    for e, k, width, top_k in [(8, 512, 192, 2), (64, 272, 136, 6), (3, 48, 80, 2), (4, 2048, 16, 1)]:
        x, routing, experts = rows(m, k, dtype), random_routing(m, top_k, e, low=-1), experts_of(e, k, width, 64)
        every = random_swiglu(e, k, width, limit=2.0)
        for swiglu in (
            every,
            SwiGLU(every.w13_bias, every.w2_bias),
            SwiGLU(every.w13_bias),
            SwiGLU(None, every.w2_bias, limit=0.5),
            SwiGLU(alpha=-0.5, beta=-2.5),
        ):
            check(moe(x, routing, experts, swiglu), x, routing, experts, swiglu)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 12, 40, 100, 700])
def test_biases_of_zero_are_none(m: int, dtype: torch.dtype) -> None:
    e, k, width, top_k = 6, 256, 96, 3
    args = rows(m, k, dtype), random_routing(m, top_k, e), experts_of(e, k, width)
    zeros = SwiGLU(torch.zeros(e, 2 * width), torch.zeros(e, k), limit=math.inf)
    assert torch.equal(moe(*args, zeros), moe(*args))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [2, 12, 40, 100, 700])
def test_numbers_that_are_not_finite(m: int, dtype: torch.dtype) -> None:
    """A limit bounds infinities and leaves NaN, as torch.clamp does."""
    e, k, width = 2, 64, 96
    every, experts = random_swiglu(e, k, width), experts_of(e, k, width)
    every.w13_bias[0, 3] = torch.nan
    every.w13_bias[1, :5], every.w13_bias[1, -5:] = torch.inf, -torch.inf
    ids = (torch.arange(m, dtype=torch.int32) % 2)[:, None]
    x, routing = rows(m, k, dtype), (torch.ones(m, 1), ids)
    got = moe(x, routing, experts, every)
    want, *_ = experts.on_gpu_in_float64(x.cuda(), *(tensor.cuda() for tensor in routing), every.cuda())
    assert got[0::2].isnan().all() and want[1::2].isfinite().all()
    size = float(want[1::2].abs().max())
    torch.testing.assert_close(got[1::2].double(), want[1::2], rtol=0, atol=2 * ROUNDING[dtype] * size + 1e-5 * size)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 20, 150, 700])
@pytest.mark.parametrize("kind", ["one expert", "two experts", "some elsewhere", "all elsewhere", "the same twice"])
def test_routing(kind: str, m: int, dtype: torch.dtype) -> None:
    e, k, width, top_k = 12, 256, 96, 4
    factors, ids = random_routing(m, top_k, e, low=-1 if kind == "some elsewhere" else 0)
    if kind == "one expert":
        ids[:] = 7
    elif kind == "two experts":
        ids[:] = torch.tensor([11, 0, 11, 0])
    elif kind == "all elsewhere":
        ids[:] = -1
    elif kind == "the same twice":
        ids[:, 1] = ids[:, 0]
    x, routing, experts = rows(m, k, dtype), (factors, ids), experts_of(e, k, width, 64)
    got = moe(x, routing, experts)
    check(got, x, routing, experts)
    if kind == "all elsewhere":
        assert not got.any()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_nothing_to_do(dtype: torch.dtype) -> None:
    experts = experts_of(4, 64, 32)
    assert moe(rows(0, 64, dtype), random_routing(0, 2, 4), experts).shape == (0, 64)
    assert not moe(rows(3, 64, dtype), random_routing(3, 0, 4), experts).any()


def test_more_tokens_than_one_launch_takes() -> None:
    """The results of pairs, 64 KiB a token, are more than what is kept at a time."""
    m, e, k, width, top_k = 5000, 4, 1024, 16, 16
    x, routing, experts = rows(m, k, BF16), random_routing(m, top_k, e, low=-1), experts_of(e, k, width)
    check(moe(x, routing, experts), x, routing, experts)


@pytest.mark.parametrize("mean", [-1, 100000])
def test_other_kernels(mean: int) -> None:
    """The same tests where the sm_90 GEMM serves every M, or none, as on other GPUs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has one kind of kernel")
    selected = (
        "test_every_number_of_tokens or test_sizes or test_qwen3_30b or test_gpt_oss_20b or test_routing or "
        "test_the_same_bits or test_biases or test_numbers_that_are_not_finite"
    )
    run_again(__file__, selected, INT4_MOE_SM80_MEAN=mean)


@pytest.mark.parametrize("m", [1, 60])
def test_memory_that_is_not_aligned(m: int) -> None:
    x, routing, experts = (
        rows(m, 128, BF16),
        random_routing(m, 2, 4),
        Experts(4, 128, 64, 32, scales=BF16, device="cuda"),
    )
    swiglu = random_swiglu(4, 128, 64)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view(tensor.shape).copy_(tensor)

    there = dataclasses.replace(swiglu, w13_bias=moved(swiglu.w13_bias), w2_bias=moved(swiglu.w2_bias))
    experts.packed = [moved(tensor) for tensor in experts.packed]
    got = call(MOE, moved(x), *(moved(tensor) for tensor in routing), *experts.arguments(there), returns=1)
    check(got, x, routing, experts, swiglu)


@pytest.mark.parametrize("scales", [F32, BF16, F16])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_scales_of_another_dtype(dtype: torch.dtype, scales: torch.dtype) -> None:
    """They are rounded to the activations' dtype, in float32 kept."""
    x, routing, experts = rows(9, 160, dtype), random_routing(9, 2, 4), experts_of(4, 160, 72, 32, scales)
    check(moe(x, routing, experts), x, routing, experts)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_int4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, top_k = draw(st.sampled_from([1, 2, 3, 8, 31, 128, 300])), draw(st.integers(1, 10))
    k, width = 16 * draw(st.integers(1, 40)), 8 * draw(st.integers(1, 40))
    m = draw(st.integers(0, 10) | st.integers(0, 300))
    dtype, seed = draw(st.sampled_from([BF16, F16, F32])), draw(st.integers(0, 3))
    group, scales = draw(st.sampled_from([32, 64, 128, 256])), draw(st.sampled_from([BF16, F16, F32]))
    routing = random_routing(m, top_k, e, draw(st.sampled_from([-1, 0])), seed)
    experts = Experts(e, k, width, group, scales=scales, seed=seed, device="cuda")
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
    check(moe(x, routing, experts, swiglu), x, routing, experts, swiglu)


@pytest.mark.parametrize("m", [1, 8, 40, 150, 700])
def test_the_same_bits_every_time(m: int) -> None:
    x, routing, experts = rows(m, 512, BF16), random_routing(m, 4, 8), experts_of(8, 512, 256)
    for swiglu in (SILU, random_swiglu(8, 512, 256)):
        first = moe(x, routing, experts, swiglu)
        for _ in range(20):
            assert torch.equal(moe(x, routing, experts, swiglu), first)


# Groups of 128, I = 128, and SiLU's arguments, for a call with handles.
NUMBERS = (ctypes.c_int64(128), ctypes.c_int64(128), None, None, ctypes.c_double(1.0), ctypes.c_double(0.0), None)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("m", [1, 16, 100])
def test_in_a_graph(m: int, dtype: torch.dtype) -> None:
    """Captured on its first call, replayed with other rows and another routing in the same places."""
    experts = experts_of(9, 256, 128)
    x, factors, ids = on_gpu = [tensor.cuda() for tensor in (rows(m, 256, dtype), *random_routing(m, 3, 9))]
    out = torch.empty(m, 256, dtype=dtype, device="cuda")
    with captured(MOE, [*on_gpu, *experts.packed], NUMBERS, out) as graph:
        for seed in (1, 2, 3):
            x.copy_(rows(m, 256, dtype, seed))
            other_factors, other_ids = random_routing(m, 3, 9, low=-1, seed=seed)
            if seed == 3:
                other_ids[:] = 8  # all of them
            factors.copy_(other_factors)
            ids.copy_(other_ids)
            graph.replay()
            torch.cuda.synchronize()
            check(out, x, (factors, ids), experts)


@pytest.mark.parametrize("m", [1, 30, 300])
def test_on_streams_side_by_side(m: int) -> None:
    experts = experts_of(16, 512, 256)
    inputs = [(rows(m, 512, BF16, i).cuda(), *(t.cuda() for t in random_routing(m, 4, 16, seed=i))) for i in range(4)]
    want = [call(MOE, *each, *experts.arguments(), returns=1) for each in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got: list[torch.Tensor] = []
    for stream, each in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            use_torch_stream()
            for _ in range(5):
                last = call(MOE, *each, *experts.arguments(), returns=1)
            got.append(last)
    use_torch_stream()
    torch.cuda.synchronize()
    for first, second in zip(got, want, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("wrong", [-2, 4, 2**31 - 1, -(2**31)])
def test_ids_of_no_expert(wrong: int, dtype: torch.dtype) -> None:
    """The next call tells, and they count as -1 meanwhile."""
    m, experts = 70, experts_of(4, 256, 128)
    x, (factors, ids) = rows(m, 256, dtype), random_routing(m, 3, 4)
    ids[m - 1, 1] = wrong
    args = [tensor.cuda() for tensor in (x, factors, ids)]
    text = f"int4_moe: argument 'topk_ids' holds {wrong}, which is no expert; pass their numbers from 0 on, or -1"
    assert text in fault_of(MOE, *args, *experts.arguments(), returns=1)
    out = torch.full((m, 256), torch.nan, dtype=dtype, device="cuda")
    owned = [handle(tensor) for tensor in (out, *args, *experts.packed)]
    made = ctypes.c_void_p()
    raise_on(lib.aoti_torch_cuda_int4_moe(*owned[1:], *NUMBERS, ctypes.byref(made)))
    torch.cuda.synchronize()
    with pytest.raises(ShimError, match="which is no expert"):
        call("aoti_torch_cuda_abs", torch.ones(3, device="cuda"), returns=1)
    raise_on(lib.aoti_torch_copy_(owned[0], made, ctypes.c_int32(0)))
    torch.cuda.synchronize()
    for h in [*owned, made]:
        delete(h)
    check(out, x, (factors, ids), experts)


def test_refusals_launch_nothing() -> None:
    def on_gpu(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    for refused, expected in moe_refusals(on_gpu, True):
        with pytest.raises(ShimError) as error:
            call(MOE, *refused, returns=1)
        assert str(error.value) == expected
    experts = Experts(4, 32, 32, 32)
    x, routing = rows(3, 32, BF16), random_routing(3, 2, 4)
    for place, name in enumerate(NAMES):
        tensors = (x, *routing, *experts.packed)
        args = [tensor if i == place else tensor.cuda() for i, tensor in enumerate(tensors)]
        with pytest.raises(ShimError, match=f"argument '{name}' is on cpu, expected cuda"):
            call(MOE, *args, 32, 32, *SILU.arguments(), returns=1)
    on_device = experts_of(4, 32, 32, 32)
    check(moe(x, routing, on_device), x, routing, on_device)
