"""int4 MoE (fused experts) on the CPU, in both layouts, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.int4_experts import BF16, F16, F32, Args, Experts, moe_refusals
from tests.native.nvfp4_experts import ROUNDING, SILU, SwiGLU, random_routing, random_swiglu
from tests.native.shim import ShimError, call

MOE = "aoti_torch_cpu_int4_moe"


def moe(x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor, experts: Experts, swiglu: SwiGLU = SILU) -> Any:
    return call(MOE, x, factors, ids, *experts.arguments(swiglu), returns=1)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_int4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, k, width = draw(st.sampled_from([1, 3, 16, 64])), 16 * draw(st.integers(1, 9)), 8 * draw(st.integers(1, 20))
    m, top_k, seed = draw(st.sampled_from([0, 1, 2, 7, 40])), draw(st.integers(1, 8)), draw(st.integers(0, 99))
    dtype, integers = draw(st.sampled_from([F32, BF16, F16])), draw(st.booleans())
    scales = draw(st.sampled_from([F32, BF16, F16]))
    group, symmetric = draw(st.sampled_from([32, 64, 128, 256])), draw(st.booleans())
    experts = Experts(e, k, width, group, integers, scales, seed, symmetric=symmetric)
    if integers:
        assert {experts.packed[1].shape[2], experts.packed[3].shape[2]} == {1 if symmetric else 2}
    factors, ids = random_routing(m, top_k, e, draw(st.sampled_from([-1, 0])), seed)
    if draw(st.booleans()):
        ids[:] = e - 1  # all on one expert
    x = torch.randn((m, k + 5), generator=torch.Generator().manual_seed(seed)).to(dtype)
    x = x[:, 5:] if draw(st.booleans()) else x[:, :k].contiguous()
    swiglu = SILU
    if draw(st.booleans()):
        swiglu = random_swiglu(e, k, width, seed=seed, limit=draw(st.sampled_from([None, 7.0])))
    got = moe(x, factors, ids, experts, swiglu)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((m, k), dtype, True)
    want, size = experts.in_float64(x, factors, ids, swiglu)
    least = torch.finfo(dtype).smallest_normal * ROUNDING[dtype]
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[dtype] + size * 2.0**-18 + least)
    assert torch.equal(moe(x, factors, ids, experts, swiglu), got)


@pytest.mark.parametrize("integers", [False, True])
def test_experts_of_few_and_of_many_tokens(integers: bool) -> None:
    """With AMX the one call for all experts computes some of them in bfloat16."""
    counts = [31, 0, 32, 1, 70, 33]
    experts = Experts(6, 96, 40, 32, integers, BF16)
    ids = torch.repeat_interleave(torch.tensor(counts))[:, None].to(torch.int32)
    x, factors = torch.randn(sum(counts), 96), torch.rand(sum(counts), 1)
    got = moe(x, factors, ids, experts)
    want, size = experts.in_float64(x, factors, ids, SILU)
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[F32] + size * 2.0**-18)
    # An expert's tokens do not see those of the others.
    many = ids[:, 0] == 4
    assert torch.equal(moe(x[many], factors[many], ids[many], experts), got[many])


@pytest.mark.parametrize("integers", [False, True])
def test_a_token_alone_and_among_others(integers: bool) -> None:
    """Rows do not influence each other."""
    experts = Experts(5, 64, 48, 32, integers)
    x, (factors, ids) = torch.randn(9, 64), random_routing(9, 3, 5)
    together = moe(x, factors, ids, experts)
    if integers:
        for i in range(9):
            alone = moe(x[i : i + 1], factors[i : i + 1], ids[i : i + 1], experts)
            torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(moe(x.flip(0), factors.flip(0), ids.flip(0), experts).flip(0), together)


@pytest.mark.parametrize("integers", [False, True])
def test_no_expert(integers: bool) -> None:
    experts = Experts(4, 32, 16, 32, integers)
    for wrong in (4, -2):
        factors, ids = random_routing(3, 2, 4)
        ids[1, 1] = wrong
        with pytest.raises(ShimError) as error:
            moe(torch.ones(3, 32), factors, ids, experts)
        assert str(error.value) == (
            f"int4_moe: argument 'topk_ids' must have experts from 0 to 3, or -1 for none, got {wrong} for token 1"
        )


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("args", "expected"), [case for kind in (False, True) for case in moe_refusals(zeros, False, kind)]
)
def test_refused(args: Args, expected: str) -> None:
    with pytest.raises(ShimError) as error:
        call(MOE, *args, returns=1)
    assert str(error.value) == expected
