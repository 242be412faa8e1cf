"""``untorch::decoder_linears``: the reference against float64, torch's own checks of an operator, and its contract."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.native.decoder_layers import in_float64, operands
from untorch.ops.decoder_linears import OPERATOR, decoder_linears_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of values around 1 that are rounded once for each layer before them.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.mark.slow
@hypothesis.given(
    tokens=st.integers(0, 5),
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    group=st.sampled_from([0, 32, 64, 128, 256]),
    has_next=st.booleans(),
    bias=st.booleans(),
    inner_k_tiles=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_values(
    tokens: int, sizes: tuple[int, ...], group: int, has_next: bool, bias: bool, inner_k_tiles: int, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    ko, width, inner, n = (256 * size for size in sizes) if group else (8 * size for size in sizes)
    given = operands(
        tokens, ko, width, inner, n if has_next else None, dtype, group, bias=bias, seed=seed, inner_k_tiles=inner_k_tiles,
        scales_dtype=torch.float32 if dtype == torch.float64 else None,
    )  # fmt: skip
    out, residual_out = OPERATOR(**given)
    assert (out.dtype, residual_out.dtype) == (dtype, dtype)
    assert out.shape == (tokens, n if has_next else width) and residual_out.shape == (tokens, width)
    assert out.is_contiguous() and residual_out.is_contiguous()
    for found, expected in zip((out, residual_out), in_float64(given), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_eps_decides_for_small_rows() -> None:
    given = operands(3, 16, 16, 16, 16, torch.float32)
    given |= {"x": given["x"] * 1e-4, "residual": given["residual"] * 1e-4, "eps": 1e-3, "next_eps": 1e-7}
    for found, expected in zip(OPERATOR(**given), in_float64(given), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_the_gate_comes_first() -> None:
    given = operands(2, 8, 8, 8, None, torch.float32)
    given["gate_up_weight"] = torch.cat((torch.zeros(8, 8), torch.ones(8, 8)))  # silu(0) is 0
    _, residual_out = OPERATOR(**given)
    torch.testing.assert_close(residual_out, given["residual"] + given["x"] @ given["o_weight"].T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("n", [None, 256])
def test_opcheck(dtype: torch.dtype, group: int, n: int | None) -> None:
    given = operands(3, 256, 256, 256, n, dtype, group, bias=True)
    torch.library.opcheck(OPERATOR, tuple(given.values()))


def test_rows_that_are_not_adjacent() -> None:
    given = operands(4, 16, 16, 16, 16, torch.float32)
    wide = {name: torch.cat((given[name], given[name]), 1)[:, :16] for name in ("x", "residual")}
    for found, expected in zip(OPERATOR(**(given | wide)), OPERATOR(**given), strict=True):
        assert torch.equal(found, expected) and found.is_contiguous()


def test_the_cpu_has_the_reference() -> None:
    given = operands(2, 16, 16, 16, 16, torch.bfloat16)
    assert all(map(torch.equal, OPERATOR(**given), decoder_linears_reference(**given)))


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("group", "changed", "text"),
    [
        (0, {"x": torch.ones(2, 3, 16)}, "x: expected floating point [tokens, k], got float32 [2, 3, 16]"),
        (0, {"x": torch.ones(2, 16).int()}, "x: expected floating point [tokens, k], got int32 [2, 16]"),
        (
            0,
            {"residual": torch.ones(3, 16)},
            "residual: expected float32 [tokens, width] with as many tokens as x, got float32 [3, 16]",
        ),
        (0, {"residual": torch.ones(2, 16).half()}, "residual: expected float32 [tokens, width]"),
        (0, {"residual": torch.ones(2, 1, 16)}, "residual: expected float32 [tokens, width]"),
        (
            0,
            {"group_size": 16},
            "group_size: expected 32, 64, 128 or 256 for int4 weights, or 0 for dense ones, got 16",
        ),
        (0, {"o_scales": torch.ones(1)}, "o_scales: expected None with a group_size of 0"),
        (0, {"o_weight": torch.ones(16, 16).half()}, "o_weight: expected contiguous float32 [n, k], got float16"),
        (0, {"o_weight": torch.ones(16)}, "o_weight: expected contiguous float32 [n, k], got float32 [16]"),
        (
            0,
            {"down_weight": torch.ones(8, 16).T},
            "down_weight: expected contiguous float32 [n, k], got float32 [16, 8], not contiguous",
        ),
        (0, {"o_weight": torch.ones(16, 17)}, "o_weight: expected [16, 16], got [16, 17]"),
        (0, {"o_weight": torch.ones(24, 16)}, "o_weight: expected [16, 16], got [24, 16]"),
        (0, {"gate_up_weight": torch.ones(16, 17)}, "gate_up_weight: expected [n, 16], got [16, 17]"),
        (0, {"gate_up_weight": torch.ones(17, 16)}, "gate_up_weight: expected an even n, gate and up, got 17"),
        (0, {"down_weight": torch.ones(16, 9)}, "down_weight: expected [16, 8], got [16, 9]"),
        (0, {"next_weight": torch.ones(24, 8)}, "next_weight: expected [n, 16], got [24, 8]"),
        (
            0,
            {"next_weight": None},
            "next_scales, next_bias: expected None without next_weight",
        ),
        (0, {"norm": torch.ones(15)}, "norm: expected contiguous float32 [16], got float32 [15]"),
        (0, {"next_norm": torch.ones(16).half()}, "next_norm: expected contiguous float32 [16], got float16 [16]"),
        (0, {"norm": torch.ones(1, 16)}, "norm: expected contiguous float32 [16], got float32 [1, 16]"),
        (0, {"next_bias": torch.ones(16)}, "next_bias: expected contiguous float32 [24], got float32 [16]"),
        (
            0,
            {"norm": torch.ones(32)[::2]},
            "norm: expected contiguous float32 [16], got float32 [16], not contiguous",
        ),
        (0, {"norm": torch.ones(16, device="meta")}, "norm: expected the device of x, cpu, got meta"),
        (
            64,
            {"o_weight": torch.ones(256, 256)},
            "o_weight: expected contiguous int32 [n / 8][k / (16 · inner_k_tiles)][32][inner_k_tiles / 2] with a "
            "group_size of 64, got float32 [256, 256]",
        ),
        (64, {"o_weight": torch.ones(32, 2, 32, 8).int()}, "got int32 [32, 2, 32, 8]"),
        (64, {"o_weight": torch.ones(32, 2, 16, 4).int()}, "got int32 [32, 2, 16, 4]"),
        (
            256,
            {"down_weight": torch.ones(32, 3, 32, 4).int()},
            "group_size: expected a divisor of down_weight's k = 384, got 256",
        ),
        (
            64,
            {"down_scales": None},
            "down_scales: expected contiguous bfloat16, float16 or float32 [4, 256, 2], got None",
        ),
        (
            64,
            {"o_scales": torch.ones(4, 255, 2)},
            "o_scales: expected contiguous bfloat16, float16 or float32 [4, 256, 2], got float32 [4, 255, 2]",
        ),
        (64, {"o_scales": torch.ones(4, 256, 2).double()}, "got float64 [4, 256, 2]"),
        (64, {"o_weight": torch.ones(34, 2, 32, 4).int(), "o_scales": torch.ones(4, 272, 2)},
         "o_weight: expected [256, 256], got [272, 256]"),
    ],
)  # fmt: skip
def test_contract(group: int, changed: dict[str, Any], text: str, fake: bool) -> None:
    base = (2, 256, 256, 256, 256) if group else (2, 16, 16, 8, 24)
    given = operands(*base, torch.float32, group, bias=True) | changed
    mode: Any = torch._subclasses.FakeTensorMode() if fake else None
    if mode is not None:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        OPERATOR(**given)
    assert str(error.value).startswith("decoder_linears: ")
    assert text in str(error.value)
