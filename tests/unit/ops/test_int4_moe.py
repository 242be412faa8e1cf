"""``untorch::int4_moe``: the library's kernel beside the reference, torch's checks of an operator, its contract."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from tests.native.int4_experts import Experts
from tests.native.nvfp4_experts import random_routing, random_swiglu
from untorch.ops.int4_moe import OPERATOR, _int4_moe_fake, int4_moe_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arguments(integers: bool = False, dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    experts = Experts(4, 32, 16, 32, integers)
    factors, ids = random_routing(3, 2, 4)
    names = ("w13", "w13_scale_and_zero", "w2", "w2_scale_and_zero")
    base = {
        "hidden_states": torch.randn(3, 32).to(dtype), "topk_weights": factors, "topk_ids": ids,
        **dict(zip(names, experts.packed, strict=True)), "group_size": 32, "intermediate": 16,
    }  # fmt: skip
    return base | changed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("integers", [False, True])
@given(st.sampled_from([1, 5]), st.integers(1, 6), st.integers(1, 10), st.sampled_from([32, 128]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_the_library_gives_the_same_as_the_reference(
    dtype: torch.dtype, integers: bool, e: int, k: int, width: int, group: int, plain: bool
) -> None:
    experts = Experts(e, 16 * k, 8 * width, group, integers)
    x, (factors, ids) = torch.randn(7, 16 * k).to(dtype), random_routing(7, 3, e, -1)
    more: tuple[Any, ...] = ()
    if not plain:
        swiglu = random_swiglu(e, 16 * k, 8 * width)
        more = swiglu.w13_bias, swiglu.w2_bias, swiglu.alpha, swiglu.beta, swiglu.limit
    given = (x, factors, ids, *experts.packed, group, 8 * width, *more)
    got, want = OPERATOR(*given), int4_moe_reference(*given)
    assert got.dtype == dtype
    assert got.is_contiguous()
    # Between the GEMMs values may be rounded to either neighbour.
    atol = float(want.double().abs().max()) * (2e-2 if integers else 1e-5 if dtype.itemsize >= 4 else 2e-2)
    torch.testing.assert_close(got, want, rtol=0, atol=atol + 1e-9)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(integers: bool, dtype: torch.dtype) -> None:
    given = arguments(integers, dtype)
    torch.library.opcheck(OPERATOR, tuple(given.values()))
    torch.library.opcheck(OPERATOR, (*given.values(), torch.randn(4, 32), None, 1.702, 1.0, 7.0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = arguments(True)
        for name in ("w13", "w13_scale_and_zero", "w2", "w2_scale_and_zero"):
            self.register_buffer(name, given[name])

    def forward(self, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = self.w13, self.w13_scale_and_zero, self.w2, self.w2_scale_and_zero
        y: torch.Tensor = OPERATOR(x, factors, ids, *weights, 32, 16)
        return y + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
def test_export_keeps_it_as_one_node_and_the_tokens_may_vary() -> None:
    net, tokens = Net(), Dim("tokens")
    example = torch.randn(3, 32), *random_routing(3, 2, 4)
    program = torch.export.export(net, example, dynamic_shapes=({0: tokens},) * 3)
    nodes = [node for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert nodes[0].target == OPERATOR
    x = torch.randn(8, 32), *random_routing(8, 2, 4)
    assert torch.equal(program.module()(*x), net(*x))


def test_no_tokens_and_ids_of_no_expert() -> None:
    given = arguments(hidden_states=torch.ones(0, 32), topk_weights=torch.ones(0, 2))
    given["topk_ids"] = torch.zeros(0, 2, dtype=torch.int32)
    assert OPERATOR(**given).shape == (0, 32)
    for integers in (False, True):
        for wrong in (4, -2):
            given = arguments(integers)
            given["topk_ids"][0, 0] = wrong
            for function in (OPERATOR, int4_moe_reference):
                text = f"^int4_moe: topk_ids: expected experts from 0 to 3, or -1 for none, got {wrong}$"
                with pytest.raises(ValueError, match=text):
                    function(**given)


I32 = torch.int32
WRONG: list[tuple[bool, dict[str, Any], str]] = [
    (False, {"group_size": 48}, "group_size: expected 32, 64, 128 or 256, got 48"),
    (False, {"intermediate": 12}, "intermediate: expected a multiple of 8 above 0, got 12"),
    (False, {"w13": torch.ones(16, 1, 32, 4)}, "w13: expected contiguous int32, packed as int4, got float32"),
    (False, {"w13": torch.ones(16, 1, 31, 4, dtype=I32)}, "w13: expected [n / 8][k / (16·t)][32][t / 2], got int32"),
    (True, {"w13": torch.ones(8, 4, 15, dtype=I32)}, "w13: expected [n / 16][k / 8][16], got int32 [8, 4, 15]"),
    (True, {"w13": torch.ones(8, 5, 16, dtype=I32)}, "w13: expected k a multiple of the group size 32, got 40"),
    (True, {"w13": torch.ones(9, 4, 16, dtype=I32), "w13_scale_and_zero": torch.ones(9, 1, 2, 16)},
     "w13: expected a multiple of 32 outputs, two times intermediate, got int32 [9, 4, 16]"),
    (True, {"w13_scale_and_zero": torch.ones(8, 1, 2, 15)},
     "w13_scale_and_zero: expected contiguous bfloat16, float16 or float32 [8, 1, 2, 16], got float32 [8, 1, 2, 15]"),
    (True, {"w2": torch.ones(16, 1, 32, 4, dtype=I32)}, "w2: expected the layout of w13, got int32 [16, 1, 32, 4]"),
    (True, {"w2": torch.ones(6, 4, 16, dtype=I32), "w2_scale_and_zero": torch.ones(6, 1, 2, 16)},
     "w2: expected K outputs for each of 4 experts, K a multiple of 16 and at most 32, and at least 16 inputs, got"),
    (False, {"hidden_states": torch.ones(3, 48)},
     "hidden_states: expected bfloat16, float16, float32 or float64 [tokens, 32], the weights' K, got float32 [3, 48]"),
    (False, {"hidden_states": torch.ones(3, 32, dtype=torch.int64)}, "hidden_states: expected bfloat16, float16"),
    (False, {"hidden_states": torch.ones(32, 3).t()},
     "hidden_states: expected a contiguous last dimension, got the stride 3: copy it"),
    (False, {"topk_weights": torch.ones(6)}, "topk_weights: expected float32 [tokens, top_k], got float32 [6]"),
    (False, {"topk_weights": torch.ones(3, 2).double()}, "topk_weights: expected contiguous float32 [3, 2], got"),
    (False, {"topk_ids": torch.zeros(3, 2, dtype=torch.int64)}, "topk_ids: expected contiguous int32 [3, 2], got int64"),
    (False, {"w13_bias": torch.ones(4, 31)}, "w13_bias: expected contiguous float32 [4, 32], got float32 [4, 31]"),
    (False, {"w2_bias": torch.ones(4, 32).half()}, "w2_bias: expected contiguous float32 [4, 32], got float16"),
    (False, {"swiglu_alpha": float("inf")}, "swiglu_alpha: expected a finite number of float32, got inf"),
    (False, {"swiglu_beta": 1e39}, "swiglu_beta: expected a finite number of float32, got 1e+39"),
    (False, {"swiglu_limit": 0.0}, "swiglu_limit: expected a number above 0, or None for no limit, got 0.0"),
]  # fmt: skip


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("integers", "changed", "text"), WRONG)
def test_refused(integers: bool, changed: dict[str, Any], text: str, fake: bool) -> None:
    function = _int4_moe_fake if fake else OPERATOR
    with pytest.raises(ValueError, match=f"^int4_moe: {re.escape(text)}"):
        function(**arguments(integers, **changed))


def test_other_devices_are_refused() -> None:
    given = arguments()
    for name in ("topk_ids", "w2", "w13_scale_and_zero"):
        with pytest.raises(ValueError, match=f"int4_moe: {name}: expected the device of "):
            _int4_moe_fake(**(given | {name: given[name].to("meta")}))
