"""``untorch::w8a8_linear`` where no GPU is: the reference beside hand-made sums, torch's checks, and the contract."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

from untorch.ops.w8a8 import (
    INT8_MAX_K,
    OPERATOR,
    block_scale_shape,
    dequantize_w8,
    round_rows,
    w8a8_linear_reference,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = torch.float8_e4m3fn


def random_weight(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return torch.randn(n, k).mul(50).clamp(-448, 448).to(FP8)


def arguments(n: int = 32, k: int = 48, weight: torch.dtype = torch.int8, blocks: bool = False, **changed: Any) -> Any:
    torch.manual_seed(0)
    dtype = changed.pop("dtype", torch.float32)
    shape = block_scale_shape(n, k) if blocks else (n,)
    base = {
        "x": torch.randn(3, 5, k).to(dtype), "weight": random_weight(n, k, weight), "scale": torch.rand(shape) / 100,
        "bias": torch.randn(n).to(dtype),
    }  # fmt: skip
    return base | changed


@pytest.mark.parametrize("dtype", FLOATS)
@given(rows=st.integers(1, 12), n=st.integers(1, 4), k=st.integers(1, 5), cut=st.integers(0, 15), bias=st.booleans())
@settings(max_examples=15, deadline=None)
def test_int8_is_a_sum_of_integers(dtype: torch.dtype, rows: int, n: int, k: int, cut: int, bias: bool) -> None:
    given_ = arguments(16 * n, 16 * k, dtype=dtype, x=torch.randn(rows, 16 * k - cut).to(dtype))
    if not bias:
        given_["bias"] = None
    x = given_["x"].float().numpy()
    largest = numpy.abs(x).max(1, keepdims=True)
    # In float32, as the kernel: half steps, of which float16 has many, must go the same way.
    q = numpy.round(x * (numpy.float32(127) / largest)).astype(numpy.int64)
    sums = q @ given_["weight"][:, : 16 * k - cut].numpy().astype(numpy.int64).T
    expected = sums * (largest / numpy.float32(127)).astype(numpy.float64) * given_["scale"].double().numpy()
    if bias:
        expected = expected + given_["bias"].double().numpy()
    got = OPERATOR(**given_)
    assert got.dtype == dtype
    assert got.is_contiguous()
    rounding = 1e-6 if dtype.itemsize >= 4 else torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("blocks", [False, True])
def test_float8_beside_values_that_are_rounded_by_hand(blocks: bool) -> None:
    given_ = arguments(144, 272, FP8, blocks)
    x = given_["x"]
    parts = [(0, 128), (128, 256), (256, 272)] if blocks else [(0, 272)]
    rounded = torch.empty(3, 5, 272, dtype=torch.float64)
    for start, end in parts:
        largest = x[..., start:end].abs().amax(-1, keepdim=True)
        rounded[..., start:end] = (x[..., start:end] * (448 / largest)).to(FP8).double() * (largest / 448).double()
    weight = given_["weight"].double()
    for row in range(144):
        for column in range(0, 272, 128):
            scale = given_["scale"][row // 128, column // 128] if blocks else given_["scale"][row]
            weight[row, column : column + 128] *= scale.double()
    assert torch.equal(dequantize_w8(given_["weight"], given_["scale"], torch.float64), weight)
    expected = rounded @ weight.T + given_["bias"].double()
    torch.testing.assert_close(OPERATOR(**given_).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight", [torch.int8, FP8])
def test_accuracy(weight: torch.dtype) -> None:
    """Of rounding the rows alone."""
    given_ = arguments(64, 512, weight)
    exact = given_["x"].double() @ dequantize_w8(given_["weight"], given_["scale"], torch.float64).T
    error = (w8a8_linear_reference(**given_).double() - given_["bias"].double() - exact).norm() / exact.norm()
    assert error < (0.01 if weight == torch.int8 else 0.03)


@pytest.mark.parametrize("weight", [torch.int8, FP8])
def test_rows_of_zeros_and_rows_that_are_not_finite(weight: torch.dtype) -> None:
    given_ = arguments(weight=weight, bias=None)
    x = given_["x"]
    x[0, 0] = 0
    x[1, 1, 3], x[2, 2, 0] = torch.nan, torch.inf
    y = OPERATOR(**given_)
    assert not y[0, 0].any()
    wrong = torch.isnan(y).all(-1)
    assert wrong.nonzero().tolist() == [[1, 1], [2, 2]]
    assert torch.isfinite(y[~wrong]).all()


def test_largest_values_keep_their_places() -> None:
    assert round_rows(torch.tensor([[-2.0, 1.0, 0.5]]), torch.int8, 3).mul(127 / 2).round().tolist() == [[-127, 64, 32]]
    assert round_rows(torch.tensor([[448.0, 17.0, -1.0]]), FP8, 3).tolist() == [[448, 16, -1]]  # ties to even
    assert round_rows(torch.zeros(2, 0), FP8, 128).shape == (2, 0)
    assert INT8_MAX_K * 127 * 128 < 2**31


def test_a_weight_that_was_padded() -> None:
    given_ = arguments(k=64)
    short = {**given_, "x": given_["x"][..., :50].contiguous()}
    weight = given_["weight"].clone()
    weight[:, 50:] = 0
    padded = {**given_, "x": torch.nn.functional.pad(short["x"], (0, 14)), "weight": weight}
    assert torch.equal(OPERATOR(**short), OPERATOR(**padded))


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("given_", [{}, {"weight": FP8}, {"weight": FP8, "blocks": True}, {"bias": None}])
def test_torch_checks_the_operator(given_: dict[str, Any]) -> None:
    sizes = {"n": 144, "k": 144} if given_.get("blocks") else {}
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if given_.get("weight") == FP8:  # which torch cannot compare, to see that it is not written
        checks.remove("test_schema")
    torch.library.opcheck(OPERATOR, tuple(arguments(**sizes, **given_).values()), test_utils=checks)


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_rows_that_vary_in_number() -> None:
    given_ = arguments()

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = OPERATOR(x, given_["weight"], given_["scale"], given_["bias"])
            return y

    program = torch.export.export(Model(), (given_["x"],), dynamic_shapes=({0: Dim("batch", min=1, max=64)},))
    assert torch.equal(program.module()(given_["x"][:1]), OPERATOR(**given_)[:1])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"weight": torch.zeros(32, 48)},
            "weight: expected contiguous int8 or float8_e4m3fn [n, k], got float32 [32, 48]",
        ),
        (
            {"weight": torch.zeros(48, 32, dtype=torch.int8).T},
            "weight: expected contiguous int8 or float8_e4m3fn [n, k]",
        ),
        (
            {"weight": torch.zeros(2, 16, 16, dtype=torch.int8)},
            "weight: expected contiguous int8 or float8_e4m3fn [n, k]",
        ),
        (
            {"weight": torch.zeros(33, 48, dtype=torch.int8)},
            "weight: expected sizes that are multiples of 16, got [33, 48]",
        ),
        ({"scale": torch.ones(31)}, "scale: expected contiguous float32 [32], got float32 [31]"),
        ({"scale": torch.ones(32).half()}, "scale: expected contiguous float32 [32], got float16 [32]"),
        ({"scale": torch.ones(1, 4)}, "scale: expected contiguous float32 [32], got float32 [1, 4]"),
        (
            {"weight": torch.zeros(32, 48).to(FP8), "scale": torch.ones(1, 1)},
            "scale: expected contiguous float32 [32] or [1, 4], got float32 [1, 1]",
        ),
        ({"x": torch.ones(2, 48).int()}, "x: expected floating point [..., k], 16 bits or more, got int32 [2, 48]"),
        ({"x": torch.ones(2, 48).to(FP8)}, "x: expected floating point [..., k], 16 bits or more, got float8_e4m3fn"),
        ({"x": torch.tensor(1.0)}, "x: expected floating point [..., k], 16 bits or more, got float32 []"),
        (
            {"x": torch.ones(2, 49)},
            "x: expected at most the weight's k = 48 in the last dimension, got float32 [2, 49]",
        ),
        ({"x": torch.ones(48, 2).T}, "x: expected a contiguous last dimension, got the stride 2: copy it"),
        ({"bias": torch.ones(31)}, "bias: expected contiguous float32 [32], got float32 [31]"),
        ({"bias": torch.ones(32).half()}, "bias: expected contiguous float32 [32], got float16 [32]"),
        ({"scale": torch.ones(32, device="meta")}, "scale: expected the device of x, cpu, got meta"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^w8a8_linear: ") as error:
        OPERATOR(**arguments(**{k: v for k, v in changed.items() if k != "weight"}) | changed)
    assert str(error.value).startswith(f"w8a8_linear: {text}")
