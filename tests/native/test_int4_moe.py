"""int4 MoE (fused experts) on the CPU, in both layouts, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_experts import ROUNDING, SILU, SwiGLU, random_routing, random_swiglu
from tests.native.shim import Opt, ShimError, call
from tests.native.test_w4a8 import quantized
from untorch.ops.int4_layout import pack_int4
from untorch.ops.w4a8_layout import pack_w4a8

MOE = "aoti_torch_cpu_int4_moe"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("hidden_states", "topk_weights", "topk_ids", "w13", "w13_scale_and_zero", "w2", "w2_scale_and_zero")


class Experts:
    """Random experts of about unit size: packed in the layout for integers or not, and in float64."""

    def __init__(
        self, e: int, k: int, width: int, group: int, integers: bool, scales: torch.dtype = F32, seed: int = 0
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.group, self.width, self.integers = group, width, integers
        self.packed: list[torch.Tensor] = []
        self.dense = []
        for n, inputs in ((2 * width, k), (k, width)):
            unit = group if integers else math.lcm(group, 128)
            padded = -(-inputs // unit) * unit
            values = torch.randint(0, 16, (e * n, padded), generator=generator, dtype=torch.uint8)
            scale = torch.rand((padded // group, e * n), generator=generator) * 0.02 + 0.01
            zero = torch.randn((padded // group, e * n), generator=generator) * 0.03
            both = torch.stack([scale, zero], -1).to(scales)
            self.packed += pack_w4a8(values, both) if integers else (pack_int4(values), both)
            wide = both.double().permute(2, 1, 0).repeat_interleave(group, -1)
            matrix = (values.double() - 8) * wide[0] + wide[1]
            self.dense.append(matrix[:, :inputs].reshape(e, n, inputs))

    def arguments(self, swiglu: SwiGLU = SILU) -> tuple[Any, ...]:
        return *self.packed, self.group, self.width, *swiglu.arguments()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """What the GEMMs multiply with, in float64."""
        if not self.integers:
            return x.double()
        return quantized(x, -(-x.shape[-1] // 32) * 32)[:, : x.shape[-1]]

    def in_float64(
        self, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor, swiglu: SwiGLU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and how large its sums could be."""
        y, size = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            first, second = self.dense[0][expert], self.dense[1][expert]
            none = torch.zeros((), dtype=torch.float64)
            b13, b2 = (none if b is None else b[expert].double() for b in (swiglu.w13_bias, swiglu.w2_bias))
            tokens, places = torch.where(ids == expert)
            weights = factors[tokens, places].double()[:, None]
            rows = self.rounded(x[tokens])
            gate, up = (rows @ first.t() + b13).chunk(2, -1)
            most_gate, most_up = (rows.abs() @ (first.abs() + 0.1).t() + b13.abs()).chunk(2, -1)
            act = swiglu.of(gate, up)
            most = most_gate * (most_up + abs(swiglu.beta))
            y.index_add_(0, tokens, weights * (self.rounded(act) @ second.t() + b2))
            size.index_add_(0, tokens, weights.abs() * (most @ (second.abs() + 0.1).t() + b2.abs()))
            if self.integers:  # a value between two steps may be rounded to either
                step = (act.abs().amax(-1, keepdim=True) / 127) * second.abs().amax()
                size.index_add_(0, tokens, (weights.abs() * step * 2.0**19).expand(-1, x.shape[1]))
        return y, size


def moe(x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor, experts: Experts, swiglu: SwiGLU = SILU) -> Any:
    return call(MOE, x, factors, ids, *experts.arguments(swiglu), returns=1)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_int4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, k, width = draw(st.sampled_from([1, 3, 16, 64])), 16 * draw(st.integers(1, 9)), 8 * draw(st.integers(1, 20))
    m, top_k, seed = draw(st.sampled_from([0, 1, 2, 7, 40])), draw(st.integers(1, 8)), draw(st.integers(0, 99))
    dtype, integers = draw(st.sampled_from([F32, BF16, F16])), draw(st.booleans())
    scales = draw(st.sampled_from([F32, BF16, F16]))
    experts = Experts(e, k, width, draw(st.sampled_from([32, 64, 128, 256])), integers, scales, seed)
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


I32 = torch.int32
# For both layouts, then for that of floating point, and that of integers: what is changed, and the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({name: None}, f"argument '{name}' is null") for name in NAMES
] + [
    ({"hidden_states": zeros(3, 32, dtype=torch.float64)},
     "argument 'hidden_states' must be float32, bfloat16 or float16, got float64"),
    ({"hidden_states": zeros(3, 2, 32)}, "argument 'hidden_states' must be 2-D, got shape [3, 2, 32]"),
    ({"hidden_states": zeros(3, 33)},
     "argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape [3, 33]"),
    ({"topk_weights": zeros(6)}, "argument 'topk_weights' must be 2-D, got shape [6]"),
    ({"topk_weights": zeros(2, 2)},
     "argument 'topk_weights' must have shape [3, 2], got [2, 2]"),
    ({"topk_ids": zeros(3, 2, dtype=torch.int64)},
     "argument 'topk_ids' must be int32, got int64"),
    ({"group": 16}, "argument 'group_size' must be 32, 64, 128 or 256, got 16"),
    ({"width": 12}, "argument 'intermediate' must be a multiple of 8 above 0, got 12"),
    ({"w13_scale_and_zero": zeros(1, 128, 2, dtype=torch.float64)},
     "argument 'w13_scale_and_zero' must be float32, bfloat16 or float16, got float64"),
    ({"w13_bias": zeros(4, 31)},
     "argument 'w13_bias' must have shape [4, 32], got [4, 31]"),
    ({"w2_bias": zeros(4, 32, dtype=F16)},
     "argument 'w2_bias' must be float32, got float16"),
    ({"alpha": math.nan}, "argument 'swiglu_alpha' must be a finite number of float32, got nan"),
    ({"beta": 1e39}, "argument 'swiglu_beta' must be a finite number of float32, got 1e+39"),
    ({"limit": 0.0}, "argument 'swiglu_limit' must be above 0, or null for no limit, got 0"),
]  # fmt: skip
OF_FLOATS = [
    ({"w13": zeros(17, 1, 32, 4, dtype=I32)},
     "argument 'w13' must have a multiple of 32 outputs, two times 'intermediate', got shape [17, 1, 32, 4]"),
    ({"w13": zeros(16, 1, 32, 3, dtype=I32)},
     "argument 'w13' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got shape [16, 1, 32, 3]"),
    ({"w13": zeros(16, 0, 32, 4, dtype=I32)},
     "argument 'w13' must have k of at least 32 and a multiple of the group size 32, got shape [16, 0, 32, 4]"),
    ({"w13": zeros(16, 1, 32, 4)},
     "argument 'w13' must be int32, got float32"),
    ({"w2": zeros(12, 1, 32, 4, dtype=I32)},
     "argument 'w2' must have shape [16, 1, 32, 4], got [12, 1, 32, 4]"),
    ({"w2_scale_and_zero": zeros(4, 128, 1)},
     "argument 'w2_scale_and_zero' must have shape [4, 128, 2], got [4, 128, 1]"),
]  # fmt: skip
OF_INTEGERS = [
    ({"w13": zeros(9, 4, 16, dtype=I32)},
     "argument 'w13' must have a multiple of 32 outputs, two times 'intermediate', got shape [9, 4, 16]"),
    ({"w13": zeros(8, 5, 16, dtype=I32)},
     "argument 'w13' must have shape [8, 4, 16], got [8, 5, 16]"),
    ({"w2": zeros(8, 4, 16, 1, dtype=I32)},
     "argument 'w2' must have shape [8, 4, 16], got [8, 4, 16, 1]"),
    ({"w2_scale_and_zero": zeros(8, 1, 16, 2)},
     "argument 'w2_scale_and_zero' must have shape [8, 1, 2, 16], got "
     "[8, 1, 16, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("integers", "changed", "expected"),
    [(kind, *case) for kind in (False, True) for case in [*REFUSED, *(OF_INTEGERS if kind else OF_FLOATS)]],
)
def test_refused(integers: bool, changed: dict[str, Any], expected: str) -> None:
    experts = Experts(4, 32, 16, 32, integers)
    good = [zeros(3, 32), zeros(3, 2), zeros(3, 2, dtype=I32), *experts.packed]
    tensors = [changed.get(name, tensor) for name, tensor in zip(NAMES, good, strict=True)]
    swiglu = (Opt(changed.get("w13_bias")), Opt(changed.get("w2_bias")), changed.get("alpha", 1.0))
    more = (*swiglu, changed.get("beta", 0.0), Opt(changed.get("limit"), "double"))
    with pytest.raises(ShimError) as error:
        call(MOE, *tensors, changed.get("group", 32), changed.get("width", 16), *more, returns=1)
    assert str(error.value) == f"int4_moe: {expected}"
