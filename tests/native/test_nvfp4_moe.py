"""A mixture of experts in NVFP4 on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_experts import ROUNDING, Args, in_float64, moe_refusals, random_experts, random_routing
from tests.native.nvfp4_weights import BF16, F16, F32
from tests.native.shim import ShimError, call

MOE = "aoti_torch_cpu_nvfp4_moe"


def moe(*args: torch.Tensor | None) -> torch.Tensor:
    got: torch.Tensor = call(MOE, *args, returns=1)
    return got


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nvfp4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, k, width = draw(st.sampled_from([1, 3, 16, 256])), 16 * draw(st.integers(1, 6)), 16 * draw(st.integers(1, 4))
    m, top_k, seed = draw(st.sampled_from([0, 1, 2, 7, 40])), draw(st.integers(1, 8)), draw(st.integers(0, 99))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    weights = random_experts(e, k, width, draw(st.booleans()), seed)
    factors, ids = random_routing(m, top_k, e, draw(st.sampled_from([-1, 0])), seed)
    if draw(st.booleans()):
        ids[:] = e - 1  # all on one expert
    x = torch.randn((m, k + 5), generator=torch.Generator().manual_seed(seed)).to(dtype)
    x = x[:, 5:] if draw(st.booleans()) else x[:, :k].contiguous()
    got = moe(x, factors, ids, *weights)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((m, k), dtype, True)
    want, size, _, _ = in_float64(x, factors, ids, *weights)
    least = torch.finfo(dtype).smallest_normal * ROUNDING[dtype]  # half a step of subnormal numbers
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[dtype] + size * 2.0**-18 + least)
    assert torch.equal(moe(x, factors, ids, *weights), got)


@pytest.mark.parametrize("wrong", [4, -2])
def test_no_expert(wrong: int) -> None:
    factors, ids = random_routing(3, 2, 4)
    ids[1, 1] = wrong
    text = f"'topk_ids' must have experts from 0 to 3, or -1 for none, got {wrong} for token 1"
    with pytest.raises(ShimError, match="^nvfp4_moe: argument " + text):
        moe(torch.ones(3, 32), factors, ids, *random_experts(4, 32, 32, False))


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("args", "expected"), moe_refusals(zeros))
def test_refused(args: Args, expected: str) -> None:
    with pytest.raises(ShimError) as error:
        moe(*args)
    assert str(error.value) == expected
