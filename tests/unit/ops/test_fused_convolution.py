"""untorch::fused_convolution: the reference beside PyTorch's convolution, stored weights, layouts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.fused_convolution import DTYPES, OPERATOR, fused_convolution, is_depthwise, stored_weight


def arguments(**changed: Any) -> dict[str, Any]:
    return {
        "x": torch.randn(2, 4, 9, 8), "weight": torch.randn(6, 3, 3, 4), "bias": torch.randn(6), "residual": None,
        "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0],
        "groups": 1, "activation": "none", "channels_last": False,
    } | changed  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 3),
    form=st.sampled_from(["plain", "grouped", "depthwise", "transposed", "transposed groups"]),
    activation=st.sampled_from(ACTIVATIONS),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    channels_last=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_it_is_the_convolution_and_what_follows(
    n: int, form: str, activation: str, has_bias: bool, has_residual: bool, channels_last: bool, dtype: torch.dtype
) -> None:
    transposed = form.startswith("transposed")
    groups = {"plain": 1, "transposed": 1, "grouped": 2, "transposed groups": 2, "depthwise": 8}[form]
    outputs = 8 if form == "depthwise" else 12
    shape = (8, outputs // groups) if transposed else (outputs, 8 // groups)
    x, weight = torch.randn(2, 8, *[7, 6, 5][:n], dtype=dtype), torch.randn(*shape, *[3, 2, 3][:n], dtype=dtype)
    bias = torch.randn(outputs, dtype=dtype) if has_bias else None
    lists = ([1] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
    want = torch.ops.aten.convolution(x, weight, bias, *lists)
    largest = float(want.abs().max())
    residual = torch.randn_like(want) if has_residual else None
    want = activate(want if residual is None else want + residual, activation)
    stored = stored_weight(weight, transposed, groups)
    assert stored.is_contiguous()
    assert stored.dim() == (n + 1 if form == "depthwise" else n + 2)
    got = fused_convolution(x, stored, bias, residual, *lists, activation, channels_last)
    # Another order of sums, and eager rounds the convolution, of which a residual may leave little.
    near = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(got, want, rtol=4 * near, atol=near * max(largest, 1.0))
    last = torch.channels_last if n == 2 else torch.channels_last_3d
    assert got.is_contiguous(memory_format=last if channels_last else torch.contiguous_format)
    with FakeTensorMode() as mode:
        made = [None if t is None else mode.from_tensor(t) for t in (x, stored, bias, residual)]
        fake = fused_convolution(*made, *lists, activation, channels_last)
    assert (fake.shape, fake.stride(), fake.dtype) == (got.shape, got.stride(), got.dtype)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_operator(channels_last: bool) -> None:
    torch.library.opcheck(OPERATOR, tuple(arguments(activation="relu", channels_last=channels_last).values()))
    depthwise = arguments(weight=torch.randn(3, 3, 4), bias=torch.randn(4), groups=4, activation="silu")
    torch.library.opcheck(OPERATOR, tuple(depthwise.values()))


def test_one_channel_is_not_depthwise() -> None:
    assert not is_depthwise(torch.randn(1, 1, 3, 3), False, 1)
    assert not is_depthwise(torch.randn(8, 1, 3, 3), False, 4)
    assert not is_depthwise(torch.randn(4, 1, 3, 3), True, 4)
    assert is_depthwise(torch.randn(4, 1, 3, 3), False, 4)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"activation": "elu"}, "activation: expected one of none, relu, .*, got 'elu'"),
        (
            {"x": torch.randn(4, 9, 8)},
            r"x: expected float32, bfloat16 or float16 of 4 or 5 dimensions, got float32 \[4, 9, 8\]",
        ),
        ({"x": torch.randn(2, 4, 9, 8).double()}, "x: expected float32, bfloat16 or float16 of 4 or 5 dimensions"),
        (
            {"weight": torch.randn(6, 4, 3, 3)},
            r"weight: expected float32 \[outputs, kernel…, 4\], got float32 \[6, 4, 3, 3\]",
        ),
        ({"weight": torch.randn(6, 3, 3, 4).half()}, r"weight: expected float32 .*, got float16 \[6, 3, 3, 4\]"),
        (
            {"weight": torch.randn(3, 3, 4)},
            r"weight: expected float32 \[outputs, kernel…, 4\], got float32 \[3, 3, 4\]",
        ),
        (
            {"weight": torch.randn(6, 3, 3, 4), "transposed": True},
            r"weight: expected float32 \[4, kernel…, outputs\], got float32 \[6, 3, 3, 4\]",
        ),
        ({"bias": torch.randn(5)}, r"bias: expected float32 \[6\], got float32 \[5\]"),
        ({"bias": torch.randn(6).half()}, r"bias: expected float32 \[6\], got float16 \[6\]"),
        (
            {"residual": torch.randn(2, 6, 9, 7)},
            r"residual: expected float32 \[2, 6, 9, 8\], got float32 \[2, 6, 9, 7\]",
        ),
    ],
)
def test_errors(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"fused_convolution: {text}"):
        fused_convolution(**arguments(**changed))
