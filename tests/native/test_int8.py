"""The W8A8 linear layer on the CPU against exact integers, at every level of instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.operands import drawn_rows
from tests.native.shim import ROOT, Opt, ShimError, call, library_path

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RANGES = ["asymmetric", "symmetric", "static", "tensor"]
NAN, INF = float("nan"), float("inf")
FUNCTIONS = {
    "none": lambda y: y, "relu": torch.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu6": F.relu6, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}  # fmt: skip


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k] as [ceil(n/16)][ceil(k/4)][16][4], and the sums of its rows, padded."""
    n, k = values.shape
    padded = F.pad(values, (0, -k % 4, 0, -n % 16))
    packed = padded.reshape(padded.shape[0] // 16, 16, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return packed, padded.sum(1, dtype=torch.int32)


def linear(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, activation: str = "none", kind: str = "asymmetric", step: float = 0.0,
    zero: int = 0,
) -> torch.Tensor:  # fmt: skip
    packed, sums = pack(values)
    n = values.shape[0]
    got: torch.Tensor = call(
        "aoti_torch_cpu_int8_linear", x, packed, F.pad(scale, (0, -n % 16)), sums, Opt(bias), Opt(residual), activation,
        n, kind, step, zero, returns=1,
    )  # fmt: skip
    return got


def quantized(x: torch.Tensor, kind: str, step: float, zero: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """u - zero as int64 [m, k], the scale [m, 1], and the zero point [m, 1], for finite rows. In float32, as specified."""
    x = x.float()
    if kind == "tensor":
        low, high = F.pad(x, (0, 1)).min(), F.pad(x, (0, 1)).max()
        scale = ((high - low) / 255).clamp(min=step).expand(x.shape[0], 1)
        zeros = (-(low / scale).round()).long().clamp(max=255)
    elif kind == "static":
        scale, zeros = torch.full((x.shape[0], 1), step), torch.full((x.shape[0], 1), zero)
    elif kind == "symmetric":
        scale = F.pad(x, (0, 1)).abs().amax(1, keepdim=True) / torch.tensor(127.0)
        zeros = torch.full_like(scale, 128, dtype=torch.int64)
    else:
        low, high = F.pad(x, (0, 1)).amin(1, keepdim=True), F.pad(x, (0, 1)).amax(1, keepdim=True)
        scale = high / torch.tensor(255.0) - low / torch.tensor(255.0)
        zeros = (-low * (1 / scale.clamp(min=2.0**-126))).round().long().clamp(max=255)
    scale = scale.clamp(min=2.0**-126)
    u = ((x * (1 / scale)).clamp(-1000, 1000).round().long() + zeros.long()).clamp(0, 255)
    return u - zeros.long(), scale, zeros.long()


def check(
    got: torch.Tensor, x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, activation: str = "none", kind: str = "asymmetric", step: float = 0.0,
    zero: int = 0,
) -> None:  # fmt: skip
    """got beside the exact integers, then float64. float32 rounds a scaled sum twice, and its sum with the bias."""
    n = values.shape[0]
    assert got.shape == (*x.shape[:-1], n)
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    rows = x.reshape(-1, x.shape[-1])
    u, s, _ = quantized(rows, kind, step, zero)
    sums = (u @ values.long().T).double() * (s.double() * scale.double())
    added = torch.zeros(n).double() if bias is None else bias.double()
    want = FUNCTIONS[activation](sums + added)
    want = want if residual is None else want + residual.reshape(-1, n).double()
    size = sums.abs() + added.abs() + (0.0 if residual is None else residual.reshape(-1, n).double().abs()) + 1e-6
    digits = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}[x.dtype]
    bound = want.abs() * digits + size * 2.0**-21 + 1e-7 * (activation != "none") + 2.0**-24 * (x.dtype == F16)
    assert torch.all((got.reshape(-1, n).double() - want).abs() <= bound)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_drawn(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    m, n, k = draw(st.integers(1, 40)), draw(st.integers(1, 150)), draw(st.integers(1, 300))
    dtype, kind = draw(st.sampled_from([F32, BF16, F16])), draw(st.sampled_from(RANGES))
    values = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = torch.rand(n) / 64
    shift = draw(st.sampled_from([-2.0, 0.0, 2.0]))
    x = drawn_rows(draw, lambda *shape: (torch.randn(shape) + shift).to(dtype), m, k)
    bias = torch.randn(n).to(dtype) if draw(st.booleans()) else None
    residual = torch.randn(*x.shape[:-1], n).to(dtype) if draw(st.booleans()) else None
    if residual is not None and residual.dim() == 2 and draw(st.booleans()):
        residual = torch.randn(residual.shape[0], n + 5).to(dtype)[:, 2 : 2 + n]
    how = (bias, residual, draw(st.sampled_from(list(FUNCTIONS))), kind, 0.03125, draw(st.integers(0, 255)))
    check(linear(x, values, scale, *how), x, values, scale, *how)


@pytest.mark.parametrize("m", [1, 5, 30])
@pytest.mark.parametrize(("groups", "size"), [(1, 32), (2, 4), (3, 36), (4, 128)])
def test_groups(m: int, groups: int, size: int) -> None:
    """Each group's sums are the integers; those of the groups are added in float32."""
    torch.manual_seed(m)
    k = groups * size
    for n, dtype in ((1, F32), (33, F32), (70, F32), (70, BF16)):
        values = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        values[0] = -128
        packed, _ = pack(values)
        parts = values.reshape(n, groups, size)
        sums = F.pad(parts.sum(2, dtype=torch.int32), (0, 0, 0, -n % 16)).T.contiguous()
        x = torch.randint(0, 256, (m, k)).to(dtype)
        x[0] = 255
        scale = 2.0 ** torch.randint(-3, 4, (groups, n))
        bias, residual = torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
        got = call(
            "aoti_torch_cpu_int8_linear", x, packed, F.pad(scale, (0, -n % 16)), sums, Opt(bias), Opt(residual), "relu",
            n, "static", 1.0, 0, returns=1,
        )  # fmt: skip
        exact = torch.einsum("mgs,ngs->gmn", x.reshape(m, groups, size).double(), parts.double())
        want = torch.relu((exact * scale[:, None].double()).sum(0) + bias.double()) + residual.double()
        size_of = (exact * scale[:, None].double()).abs().sum(0) + 4
        assert (
            (got.double() - want).abs() <= size_of * 2.0**-22 + want.abs() * (2.0**-8 if dtype == BF16 else 0)
        ).all()


def test_one_range_for_all_rows() -> None:
    """As PyTorch's choose_qparams: an outlier costs every row. What is not finite makes all of them NaN."""
    for low in (0, -1, -254, -255):
        x = torch.randint(low, low + 256, (9, 77)).float()
        x[0, 0], x[8, 5] = low, low + 255
        values = torch.randint(-128, 128, (40, 77), dtype=torch.int8)
        got = linear(x, values, torch.ones(40), kind="tensor", step=2.0**-126)
        assert torch.equal(got.long(), x.long() @ values.long().T)
    x = torch.full((3, 77), 0.25)
    assert torch.equal(linear(x, values, torch.ones(40), kind="tensor", step=1.0), torch.zeros(3, 40))  # the least step
    assert torch.equal(linear(x * 0, values, torch.ones(40), kind="tensor", step=2.0**-126), torch.zeros(3, 40))
    large = torch.randn(300, 500)  # the threads share the rows
    large[250, 3] = 100
    many = torch.randint(-128, 128, (20, 500), dtype=torch.int8)
    check(linear(large, many, torch.ones(20), kind="tensor", step=1e-9), large, many, torch.ones(20), kind="tensor",
          step=1e-9)  # fmt: skip
    for bad in (NAN, INF, -INF):
        x[1, 60] = bad
        assert torch.isnan(linear(x, values, torch.ones(40), kind="tensor", step=1.0)).all()


@pytest.mark.parametrize("zero", [0, 1, 127, 128, 254, 255])
@pytest.mark.parametrize("m", [1, 2, 5, 13, 30])
def test_exact_integers(zero: int, m: int) -> None:
    """With scales of 1 the result is the integer, at the ends of both ranges too: vpmaddubsw would saturate."""
    torch.manual_seed(m)
    for n, k in [(1, 1), (15, 3), (16, 4), (17, 5), (31, 63), (33, 64), (48, 65), (65, 130), (130, 33), (64, 500)]:
        u = torch.randint(0, 256, (m, k))
        values = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        u[0], values[0] = 255, 127  # 500 · 255 · 255 < 2^24 · 2, and 500 · 255 · 128 < 2^24: exact in float32
        u[-1, : k // 2], values[-1] = 0, -128
        got = linear((u - zero).float(), values, torch.ones(n), kind="static", step=1.0, zero=zero)
        assert torch.equal(got.long(), (u - zero) @ values.long().T)


def test_dynamic_rows_are_exact_where_the_step_is_one() -> None:
    for low in (0, -1, -100, -254, -255):
        x = torch.randint(low, low + 256, (9, 77)).float()
        x[:, 0], x[:, 5] = low, low + 255
        values = torch.randint(-128, 128, (40, 77), dtype=torch.int8)
        assert torch.equal(linear(x, values, torch.ones(40)).long(), x.long() @ values.long().T)
    x = torch.randint(-127, 128, (9, 77)).float()
    x[:, 3] = -127
    assert torch.equal(linear(x, values, torch.ones(40), kind="symmetric").long(), x.long() @ values.long().T)


def test_saturation_of_static_ranges() -> None:
    x = torch.tensor([[1e30, -1e30, 300.0, -300.0, INF, -INF, 0.0, 1.0]])
    values = torch.eye(8, dtype=torch.int8)
    got = linear(x, values, torch.ones(8), kind="static", step=1.0, zero=100)
    assert got.tolist() == [[155.0, -100.0, 155.0, -100.0, 155.0, -100.0, 0.0, 1.0]]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 15, 16, 36])
def test_rows_that_are_not_finite(dtype: torch.dtype, bad: float, place: int) -> None:
    """Such a row is NaN, the others are what they were. Static ranges saturate infinities."""
    x = torch.randn(5, 37).to(dtype)
    values, scale = torch.randint(-127, 128, (20, 37), dtype=torch.int8), torch.rand(20)
    before = linear(x, values, scale)
    x[2, place] = bad
    for activation in ("none", "relu", "gelu"):
        got = linear(x, values, scale, activation=activation)
        assert torch.isnan(got[2]).all()
        assert torch.isfinite(got[[0, 1, 3, 4]]).all()
    assert torch.equal(linear(x, values, scale)[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    static = linear(x, values, scale, kind="static", step=0.05, zero=128)
    assert torch.isnan(static[2]).all() if bad != bad else torch.isfinite(static).all()


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric"])
def test_zeros_tiny_and_huge_rows(kind: str) -> None:
    values, scale, bias = torch.full((16, 8), 100, dtype=torch.int8), torch.ones(16), torch.arange(16.0)
    assert torch.equal(linear(torch.zeros(2, 8), values, scale, bias, kind=kind), bias.expand(2, 16))
    tiny = linear(torch.full((1, 8), 1e-44), values, scale, kind=kind)  # below the least step: 0, not NaN
    assert torch.all(tiny.abs() < 1e-30)
    x = torch.tensor([3e38, -3e38] * 4).reshape(1, 8)  # max - min is beyond float32
    got = linear(x, torch.eye(16, 8, dtype=torch.int8), scale, kind=kind)
    torch.testing.assert_close(got[:, :8], x, rtol=1e-2, atol=0)


def test_no_rows_columns_or_features() -> None:
    values = torch.ones(20, 8, dtype=torch.int8)
    assert linear(torch.ones(2, 0, 8), values, torch.ones(20)).shape == (2, 0, 20)
    assert linear(torch.ones(3, 8), values[:0], torch.ones(0)).shape == (3, 0)
    got = linear(torch.ones(3, 0), values[:, :0], torch.ones(20), torch.arange(20.0), torch.ones(3, 20))
    assert torch.equal(got, torch.arange(1.0, 21.0).expand(3, 20))


@pytest.mark.slow
@pytest.mark.unsanitized
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, hashlib\n"
        "from tests.native.test_int8 import linear\n"
        "torch.manual_seed(0)\n"
        "values = torch.randint(-127, 128, (1000, 1024), dtype=torch.int8)\n"
        "x = torch.randn(200, 1024)\n"
        "for m in (1, 7, 200):\n"
        "    y = linear(x[:m], values, torch.rand(1000), torch.randn(1000), activation='gelu')\n"
        "    print(hashlib.sha256(y.numpy().tobytes()).hexdigest())\n"
    )
    outputs = set()
    for threads in ("1", "2", "3"):
        env = {**os.environ, "OMP_NUM_THREADS": threads, "UNTORCH_LIBRARY": library_path()}
        command = [sys.executable, "-c", script, str(ROOT)]
        outputs.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3


def arguments(**changed: Any) -> list[Any]:
    packed, sums = pack(torch.ones(20, 6, dtype=torch.int8))
    given = {
        "x": torch.ones(3, 6), "weight": packed, "scale": torch.ones(32), "column_sums": sums, "bias": torch.ones(20),
        "residual": torch.ones(3, 20), "activation": "none", "out_features": 20, "input_range": "asymmetric",
        "input_scale": 0.0, "input_zero": 0,
    }  # fmt: skip
    given |= changed
    given["bias"], given["residual"] = Opt(given["bias"]), Opt(given["residual"])
    return list(given.values())


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.ones(3, 6).double()}, "argument 'x' must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.tensor(1.0)}, "argument 'x' must have at least one dimension"),
    ({"x": torch.ones(3, 9)},
     "argument 'weight' must have shape [2, 3, 16, 4] for 9 → 20 features, got [2, 2, 16, 4]"),
    ({"x": torch.ones(1, 65537)}, "argument 'x' has 65537 features, the sums of more than 65536 do not fit int32"),
    ({"weight": torch.ones(2, 2, 16, 4)}, "argument 'weight' must be int8, got float32"),
    ({"out_features": -1}, "out_features must not be negative, got -1"),
    ({"out_features": 40},
     "argument 'weight' must have shape [3, 2, 16, 4] for 6 → 40 features, got [2, 2, 16, 4]"),
    ({"scale": torch.ones(20)}, "argument 'scale' must be float32 of shape [32], got float32 of shape [20]"),
    ({"scale": torch.ones(32).double()}, "argument 'scale' must be float32 of shape [32], got float64 of shape [32]"),
    ({"column_sums": torch.ones(32)},
     "argument 'column_sums' must be int32 of shape [32], got float32 of shape [32]"),
    ({"bias": torch.ones(32)}, "argument 'bias' must have shape [20], got [32]"),
    ({"bias": torch.ones(20).bfloat16()}, "argument 'bias' must be float32 like 'x', got bfloat16"),
    ({"residual": torch.ones(20)},
     "argument 'residual' must be float32 of shape [3, 20], got float32 of shape [20]"),
    ({"residual": torch.ones(3, 20).half()},
     "argument 'residual' must be float32 of shape [3, 20], got float16 of shape [3, 20]"),
    ({"activation": "elu"},
     "activation 'elu' is not supported, expected none, relu, gelu, gelu_tanh, silu, tanh, sigmoid, relu6, hardswish "
     "or hardsigmoid"),
    ({"scale": torch.ones(4, 32)}, "argument 'scale' has 4 groups, which do not divide 6 features into multiples of 4"),
    ({"scale": torch.ones(0, 32)}, "argument 'scale' has 0 groups, which do not divide 6 features into multiples of 4"),
    ({"x": torch.ones(3, 8), "scale": torch.ones(2, 32)},
     "argument 'column_sums' must be int32 of shape [2, 32], got int32 of shape [32]"),
    ({"input_range": "row"}, "input_range 'row' is not supported, expected asymmetric, symmetric, static or tensor"),
    ({"input_range": "tensor"}, "input_scale, the least scale, must be at least 2^-126 and finite, got 0"),
    ({"input_range": "tensor", "input_scale": INF},
     "input_scale, the least scale, must be at least 2^-126 and finite, got inf"),
    ({"input_range": "static"}, "input_scale must be above 0 and finite, got 0"),
    ({"input_range": "static", "input_scale": INF}, "input_scale must be above 0 and finite, got inf"),
    ({"input_range": "static", "input_scale": NAN}, "input_scale must be above 0 and finite, got nan"),
    ({"input_range": "static", "input_scale": 1.0, "input_zero": 256}, "input_zero must be 0 to 255, got 256"),
    ({"input_range": "static", "input_scale": 1.0, "input_zero": -1}, "input_zero must be 0 to 255, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), REFUSALS)
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("aoti_torch_cpu_int8_linear", *arguments(**changed), returns=1)
    assert str(error.value) == f"int8_linear: {text}"


def test_results_in_memory_of_the_caller() -> None:
    out = torch.empty(3, 20)
    call("untorch_int8_linear", out, *arguments(residual=None))
    torch.testing.assert_close(out, torch.full((3, 20), 7.0))
    with pytest.raises(ShimError, match="int8_linear: argument 'out' must be contiguous float32"):
        call("untorch_int8_linear", torch.empty(3, 21), *arguments(residual=None))
    with pytest.raises(ShimError, match="^int8_linear: output pointer is null$"):
        call("aoti_torch_cpu_int8_linear", *arguments(), None)
