"""The padding shims against PyTorch's eager operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, ShimError, call

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel() > 0:
        assert got.stride() == want.stride()
    assert torch.equal(got, want)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pad(data: st.DataObject) -> None:
    draw = data.draw
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    n = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 4)), *(draw(st.integers(4, 6)) for _ in range(n))]
    x = (torch.randn(shape) * 9).to(draw(st.sampled_from(DTYPES if mode == "constant" else DTYPES[:4])))
    layout = draw(st.sampled_from(["rows", "last", "unbatched", "transposed"]))
    if layout == "last" and n > 1:
        x = x.to(memory_format=torch.channels_last if n == 2 else torch.channels_last_3d)
    elif layout == "unbatched":
        x = x[0]
    elif layout == "transposed" and n > 1:
        x = x.transpose(-1, -2)
    least = -1 if mode == "constant" else 0
    pad = [draw(st.integers(least, 3)) for _ in range(2 * n)]
    value = draw(st.sampled_from([None, 2.5])) if mode == "constant" else None
    if x.dtype in (torch.int64, torch.uint8, torch.bool) and value is not None:
        value = 1.0
    want = torch.ops.aten.pad(x, pad, mode, value)
    for name in ("aoti_torch_cpu_pad", "aoti_torch_aten_pad"):
        same(call(name, x, pad, mode, Opt(value, "double"), returns=1), want)


@pytest.mark.parametrize("pad", [[0, 0], [-1, 0], [0, -1, -1, 0], [-1, -1, 0, 0, 0, -1]])
@pytest.mark.parametrize("layout", ["rows", "transposed", "channels_last", "strided", "expanded", "single"])
def test_pads_that_only_crop_keep_dense_strides(pad: list[int], layout: str) -> None:
    x = torch.randn(2, 3, 4, 5)
    if layout == "transposed":
        x = x.transpose(1, 3)
    elif layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "strided":
        x = torch.randn(2, 3, 4, 10)[..., ::2]
    elif layout == "expanded":
        x = torch.randn(2, 1, 4, 5).expand(2, 3, 4, 5)
    elif layout == "single":
        x = torch.randn(1, 1, 2, 4)[..., :3]
        pad = pad[:2]
    want = torch.ops.aten.pad(x, pad, "constant", None)
    same(call("aoti_torch_cpu_pad", x, pad, "constant", Opt(None), returns=1), want)


def test_constant_pads_any_dimensions() -> None:
    x = torch.randn(2, 3, 4, 5, 6, 2, 2)
    pad = [1, 0, 0, 1, 2, 2, 0, 0, 0, 0, 1, 1, 3, -1]
    same(call("aoti_torch_cpu_pad", x, pad, "constant", None, returns=1), torch.ops.aten.pad(x, pad))
    scalar = torch.tensor(3.0)
    same(call("aoti_torch_cpu_pad", scalar, [], "constant", None, returns=1), scalar)
    empty = torch.zeros(0, 2)
    same(
        call("aoti_torch_cpu_pad", empty, [0, 0, 1, 1], "constant", Opt(4.0, "double"), returns=1),
        torch.full((2, 2), 4.0),
    )


def test_negative_reflect_and_circular() -> None:
    x = torch.randn(2, 3, 8)
    for mode in ("reflect", "replicate", "circular"):
        same(call("aoti_torch_cpu_pad", x, [-2, 3], mode, None, returns=1), torch.ops.aten.pad(x, [-2, 3], mode))


X = torch.zeros(2, 3, 4)
ERRORS = {
    "mode": (X, [1, 1], "mirror", None, "pad: argument 'mode' must be constant, reflect, replicate or circular, got 'mirror'"),
    "odd": (X, [1], "constant", None, "pad: argument 'pad' must have an even number of values, at most 6 for shape [2, 3, 4], got [1]"),
    "value": (X, [1, 1], "reflect", 2.0, "pad: mode 'reflect' takes no value, got 2"),
    "rank": (
        X, [1, 1, 1, 1, 1, 1], "reflect", None,
        ("pad: modes reflect, replicate and circular pad the last 1, 2 or 3 of 2, 3 or 4 (or one more) dimensions, "
         "got shape [2, 3, 4] with pad [1, 1, 1, 1, 1, 1]"),
    ),
    "reflect": (X, [4, 0], "reflect", None, "pad: reflect padding may be at most 3 for a dimension of size 4, got [4, 0]"),
    "circular": (X, [5, 0], "circular", None, "pad: circular padding may be at most 4 for a dimension of size 4, got [5, 0]"),
    "too much": (X, [-3, -2], "constant", None, "pad: the padding [-3, -2] removes more than shape [2, 3, 4] has"),
    "nothing": (X, [-2, -2], "replicate", None, "pad: the padding [-2, -2] leaves nothing of shape [2, 3, 4]"),
    "dimensions": (torch.zeros([1] * 13), [1, 1], "constant", None, "pad: 13 dimensions are more than the kernels take (12)"),
    "replicate": (X[:, :, :0], [2, 2], "replicate", None, "pad: replicate padding needs a value to repeat, got shape [2, 3, 0]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    x, pad, mode, value, text = ERRORS[case]
    with pytest.raises(ShimError) as failure:
        call("aoti_torch_cpu_pad", x, pad, mode, Opt(value, "double"), returns=1)
    assert str(failure.value) == text
