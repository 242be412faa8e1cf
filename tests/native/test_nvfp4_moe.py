"""NVFP4 MoE (fused experts) on the CPU, in both layouts, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_experts import (
    ROUNDING,
    SILU,
    Args,
    SwiGLU,
    by_integers_in_float64,
    in_float64,
    moe_refusals,
    random_experts,
    random_routing,
    random_swiglu,
)
from tests.native.nvfp4_panels import packed_for_integers
from tests.native.nvfp4_weights import BF16, F16, F32
from tests.native.shim import ShimError, call

MOE = "aoti_torch_cpu_nvfp4_moe"


def moe(*args: torch.Tensor, swiglu: SwiGLU = SILU) -> torch.Tensor:
    got: torch.Tensor = call(MOE, *args, *swiglu.arguments(), returns=1)
    return got


@st.composite
def swiglus(draw: st.DrawFn, e: int, k: int, width: int) -> SwiGLU:
    """SiLU, gpt-oss's, and all between: with a bias or without, with a limit or without."""
    if draw(st.booleans()):
        return SILU
    whole = random_swiglu(e, k, width, seed=draw(st.integers(0, 99)))
    return SwiGLU(
        whole.w13_bias if draw(st.booleans()) else None,
        whole.w2_bias if draw(st.booleans()) else None,
        draw(st.sampled_from([1.0, 1.702, 0.0, -0.5])),
        draw(st.sampled_from([0.0, 1.0, -2.5])),
        draw(st.sampled_from([None, 7.0, 0.5, math.inf])),
    )


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_nvfp4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, k, width = draw(st.sampled_from([1, 3, 16, 256])), 16 * draw(st.integers(1, 9)), 16 * draw(st.integers(1, 6))
    m, top_k, seed = draw(st.sampled_from([0, 1, 2, 7, 40])), draw(st.integers(1, 8)), draw(st.integers(0, 99))
    dtype, integers = draw(st.sampled_from([F32, BF16, F16])), draw(st.booleans())
    weights = random_experts(e, k, width, draw(st.booleans()), seed)
    factors, ids = random_routing(m, top_k, e, draw(st.sampled_from([-1, 0])), seed)
    if draw(st.booleans()):
        ids[:] = e - 1  # all on one expert
    x = torch.randn((m, k + 5), generator=torch.Generator().manual_seed(seed)).to(dtype)
    x = x[:, 5:] if draw(st.booleans()) else x[:, :k].contiguous()
    swiglu = draw(swiglus(e, k, width))
    stored, reference = (packed_for_integers(weights), by_integers_in_float64) if integers else (weights, in_float64)
    got = moe(x, factors, ids, *stored, swiglu=swiglu)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((m, k), dtype, True)
    want, size = reference(x, factors, ids, *weights, swiglu=swiglu)[:2]
    least = torch.finfo(dtype).smallest_normal * ROUNDING[dtype]  # half a step of subnormal numbers
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[dtype] + size * 2.0**-18 + least)
    assert torch.equal(moe(x, factors, ids, *stored, swiglu=swiglu), got)


@pytest.mark.parametrize("two", [False, True])
def test_integers_of_few_and_of_many_tokens(two: bool) -> None:
    """With AMX the one call for all experts computes some of them in bfloat16. Each has its own global scales."""
    counts = [31, 0, 32, 1, 70, 33]
    weights = random_experts(6, 112, 48, two)
    packed = packed_for_integers(weights)
    ids = torch.repeat_interleave(torch.tensor(counts))[:, None].to(torch.int32)
    x, factors = torch.randn(sum(counts), 112), torch.rand(sum(counts), 1)
    got = moe(x, factors, ids, *packed)
    want, size = by_integers_in_float64(x, factors, ids, *weights)
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[F32] + size * 2.0**-18)
    # An expert's tokens do not see those of the others.
    many = ids[:, 0] == 4
    assert torch.equal(moe(x[many], factors[many], ids[many], *packed), got[many])
    # They are the same experts, but for int8 activations.
    floats = moe(x, factors, ids, *weights)
    assert torch.nn.functional.cosine_similarity(got, floats, dim=-1).min() > 0.99


def test_silu_is_what_the_defaults_say() -> None:
    """Zeros as biases and no limit change no bit; the activation for other numbers comes close to it."""
    args = torch.randn(9, 64), *random_routing(9, 3, 5), *random_experts(5, 64, 32, True)
    want = moe(*args)
    assert torch.equal(moe(*args, swiglu=SwiGLU(torch.zeros(5, 64), torch.zeros(5, 64), limit=math.inf)), want)
    nearly = moe(*args, swiglu=SwiGLU(alpha=1 + 1e-7))
    torch.testing.assert_close(nearly, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_numbers_that_are_not_finite_stay() -> None:
    """A limit bounds infinities and leaves NaN, as torch.clamp does."""
    weights = random_experts(2, 32, 16, False)
    bias = torch.zeros(2, 32)
    bias[0, :] = math.nan
    bias[1, :] = math.inf
    args = torch.ones(2, 32), torch.ones(2, 1), torch.tensor([[0], [1]], dtype=torch.int32), *weights
    got = moe(*args, swiglu=SwiGLU(bias, alpha=1.702, beta=1.0, limit=7.0))
    want, *_ = in_float64(*args, swiglu=SwiGLU(bias, alpha=1.702, beta=1.0, limit=7.0))
    assert got[0].isnan().all() and want[0].isnan().all() and want[1].isfinite().all()
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5 * float(want[1].abs().max()))


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("wrong", [4, -2])
def test_no_expert(wrong: int, integers: bool) -> None:
    weights = random_experts(4, 32, 32, False)
    if integers:
        weights = packed_for_integers(weights)
    factors, ids = random_routing(3, 2, 4)
    ids[1, 1] = wrong
    text = f"'topk_ids' must have experts from 0 to 3, or -1 for none, got {wrong} for token 1"
    with pytest.raises(ShimError, match="^nvfp4_moe: argument " + text):
        moe(torch.ones(3, 32), factors, ids, *weights)


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("args", "expected"), moe_refusals(zeros, on_gpu=False))
def test_refused(args: Args, expected: str) -> None:
    with pytest.raises(ShimError) as error:
        call(MOE, *args, returns=1)
    assert str(error.value) == expected
