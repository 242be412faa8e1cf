"""untorch::int8_convolution and byte_max_pool in eager PyTorch: the library beside the references, packing, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from untorch.ops.byte_max_pool import byte_max_pool
from untorch.ops.int8_convolution import (
    int8_convolution,
    int8_convolution_reference,
    pack_int8_convolution,
    pad_channels,
    unpack_int8_convolution,
)
from untorch.ops.packed_convolution import is_depthwise


def arguments(channels: int = 8, out: int = 20, groups: int = 1, **changed: Any) -> dict[str, Any]:
    values = torch.randint(-127, 128, (out, channels // groups, 3, 3), dtype=torch.int8)
    packed, sums = pack_int8_convolution(values, groups)
    scale = pad_channels(torch.rand(out) / 256, groups, is_depthwise(channels, out, groups))
    return {
        "x": torch.randint(0, 256, (2, channels, 9, 9), dtype=torch.uint8), "weight": packed, "scale": scale,
        "column_sums": sums, "bias": torch.randn(out), "residual": None, "out_channels": out, "kernel": [3, 3],
        "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": groups, "activation": "relu",
        "residual_first": True, "input_range": "static", "input_scale": 0.03, "input_zero": 9, "residual_scale": 0.0,
        "residual_zero": 0, "output_scale": 0.05, "output_zero": 3, "channels_last": False,
    } | changed  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.sampled_from([(8, 20, 1), (3, 5, 1), (12, 18, 3), (37, 37, 37)]),
    activation=st.sampled_from(["none", "relu", "relu6", "silu"]),
    residual=st.sampled_from(["none", "float", "bytes"]),
    output_scale=st.sampled_from([0.0, 0.05]),
    input_range=st.sampled_from(["bytes", "static", "asymmetric", "symmetric"]),
)
def test_the_library_and_the_reference(
    sizes: tuple[int, int, int], activation: str, residual: str, output_scale: float, input_range: str
) -> None:
    torch.manual_seed(0)
    given_ = arguments(*sizes, activation=activation, output_scale=output_scale)
    if input_range != "bytes":
        given_ |= {"x": torch.randn(2, sizes[0], 9, 9), "input_range": input_range}
    if residual == "float":
        given_["residual"] = torch.randn(2, sizes[1], 9, 9)
    elif residual == "bytes":
        other = torch.randint(0, 256, (2, sizes[1], 9, 9), dtype=torch.uint8)
        given_ |= {"residual": other, "residual_scale": 0.02, "residual_zero": 100}
    got = int8_convolution(**given_)
    want = int8_convolution_reference(*list(given_.values())[:-1])
    assert got.dtype == want.dtype == (torch.uint8 if output_scale else torch.float32)
    assert got.is_contiguous()
    if not output_scale:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        assert (got.int() - want.int()).abs().max() <= (activation == "silu")
    last = int8_convolution(**{**given_, "channels_last": True})
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, got)
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for key, v in given_.items()}
        made = int8_convolution(**fake)
    assert (made.shape, made.dtype, made.stride()) == (got.shape, got.dtype, got.stride())


@pytest.mark.parametrize("sizes", [(20, 6, 1), (20, 4, 4), (33, 1, 33), (8, 5, 2)])
def test_unpacking_is_the_inverse(sizes: tuple[int, int, int]) -> None:
    out, inputs, groups = sizes
    values = torch.randint(-128, 128, (out, inputs, 3, 2), dtype=torch.int8)
    packed, sums = pack_int8_convolution(values, groups)
    assert torch.equal(unpack_int8_convolution(packed, out, inputs * groups, [3, 2], groups), values)
    depthwise = is_depthwise(inputs * groups, out, groups)
    assert torch.equal(sums, pad_channels(values.sum((1, 2, 3), dtype=torch.int32), groups, depthwise))


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"activation": "elu"}, "activation: expected one of "),
    ({"input_range": "row"}, "input_range: expected one of asymmetric, symmetric, static, tensor, got 'row'"),
    ({"input_range": "symmetric"}, "input_range: expected 'static' for uint8, got 'symmetric'"),
    ({"x": torch.ones(2, 8, 9, 9).half()}, r"x: expected float32 or uint8 \[n, c, h, w\], got "),
    ({"groups": 3}, "groups: 8 → 20 channels do not divide into 3 groups"),
    ({"x": torch.ones(1, 7282, 3, 3)}, "x: expected at most 65536 weights an output, got 65538"),
    ({"weight": torch.ones(3)}, r"weight: expected int8 \[1, 2, 18, 16, 4\], got "),
    ({"scale": torch.ones(20)}, r"scale: expected float32 \[32\], got "),
    ({"column_sums": torch.ones(32)}, r"column_sums: expected int32 \[32\], got "),
    ({"bias": torch.ones(32)}, r"bias: expected float32 \[20\], got "),
    ({"residual": torch.ones(2, 20, 9, 8)}, r"residual: expected float32 or uint8 \[2, 20, 9, 9\], got "),
    ({"residual": torch.ones(2, 20, 9, 9, dtype=torch.uint8)}, "residual_scale: expected a finite number above 0"),
    ({"input_scale": float("nan")}, "input_scale: expected a finite number above 0, got nan"),
    ({"input_zero": 256}, "input_zero: expected 0 to 255, got 256"),
    ({"output_scale": -1.0}, "output_scale: expected a finite number above 0, got -1.0"),
    ({"output_zero": -1}, "output_zero: expected 0 to 255, got -1"),
]


@pytest.mark.parametrize(("changed", "text"), ERRORS)
def test_errors(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"int8_convolution: {text}"):
        int8_convolution(**arguments() | changed)


def test_max_pool() -> None:
    x = torch.randint(0, 256, (1, 5, 9, 8), dtype=torch.uint8)
    want = F.max_pool2d(x.float(), 3, 2, 1, ceil_mode=True)
    for last in (False, True):
        got = byte_max_pool(x, list(want.shape[2:]), [3, 3], [2, 2], [1, 1], [1, 1], last)
        assert torch.equal(got.float(), want)
        assert got.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    with pytest.raises(ValueError, match=r"byte_max_pool: x: expected uint8 \[n, c, h, w\], got "):
        byte_max_pool(x.float(), [5, 4], [3, 3], [2, 2], [1, 1], [1, 1], False)
