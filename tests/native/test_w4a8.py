"""The W4A8 linear layer on the CPU, at every level of instructions: against exact integers, or rounded to bfloat16 by AMX."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.operands import drawn_rows
from tests.native.shim import ROOT, Opt, ShimError, call, lib, library_path

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GROUPS = [32, 64, 128, 256]
NAN, INF = float("nan"), float("inf")

lib.untorch_cpu_extensions.restype = ctypes.c_char_p
# With AMX, calls of so many rows are multiplied in bfloat16.
AMX_ROWS = 32 if b"amx" in lib.untorch_cpu_extensions().split() else sys.maxsize


def pack(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [n, k] as words [ceil(n/16)][k/8][16], scales and zeros [n, k/group, 2] as [ceil(n/16)][k/group][2][16];
    scales alone [n, k/group, 1] as [1][16].
    """
    (n, k), parts = values.shape, scales.shape[-1]
    panels = -(-n // 16)
    words = torch.zeros(panels * 16, k // 8, dtype=torch.int64)
    for i in range(8):  # the byte i % 4, its low or high half
        words[:n] |= values[:, i::8].long() << (8 * (i % 4) + 4 * (i // 4))
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    padded = torch.nn.functional.pad(scales, (0, 0, 0, 0, 0, panels * 16 - n))
    return (
        signed.reshape(panels, 16, k // 8).transpose(1, 2).contiguous(),
        padded.reshape(panels, 16, -1, parts).permute(0, 2, 3, 1).contiguous(),
    )


def in_bfloat16(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [n, k] as AMX multiplies with them, in float64: float32 with one FMA, rounded. scales: [n, k/group, 2]."""
    scale, zero = scales.double().repeat_interleave(values.shape[1] // scales.shape[1], 1).unbind(-1)
    base = (zero - 40 * scale).float().double()
    return (scale * (values.double() + 32) + base).float().bfloat16().double()


class Weight:
    """A random weight of about unit size: packed, in float64 [n, k], and what of it bfloat16 has."""

    def __init__(
        self, n: int, k: int, group: int, dtype: torch.dtype = F32, seed: int = 0, symmetric: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randint(0, 16, (n, k), generator=generator)
        scale = torch.rand((n, k // group), generator=generator) * 0.2 + 0.05
        zero = torch.randn(n, k // group, generator=generator) * (0.0 if symmetric else 0.3)
        scales = torch.stack([scale, zero], -1).to(dtype)
        self.n, self.group = n, group
        self.packed, self.scales = pack(self.values, scales[..., :1] if symmetric else scales)
        wide = scales.double().repeat_interleave(group, 1)
        self.dense = (self.values.double() - 8) * wide[..., 0] + wide[..., 1]
        self.rounded = in_bfloat16(self.values, scales)


def linear(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    got: torch.Tensor = call(
        "aoti_torch_cpu_w4a8_linear", x, w.packed, w.scales, w.group, w.n, Opt(bias), returns=1
    )  # fmt: skip
    return got


def quantized(x: torch.Tensor, k: int) -> torch.Tensor:
    """What the kernel multiplies with, in float64 [.., k]; the arithmetic in float32, as specified."""
    parts = torch.nn.functional.pad(x.float(), (0, k - x.shape[-1])).reshape(*x.shape[:-1], k // 32, 32)
    scale = (parts.abs().amax(-1, keepdim=True) / torch.tensor(127.0)).clamp(min=2.0**-126)
    return ((parts * (1 / scale)).round().double() * scale.double()).reshape(*x.shape[:-1], k)


def multiplied(x: torch.Tensor, k: int) -> torch.Tensor:
    """What stands for the rows of a call in its products, in float64 [.., k]."""
    if x[..., :1].numel() < AMX_ROWS:
        return quantized(x, k)
    return torch.nn.functional.pad(x.bfloat16().double(), (0, k - x.shape[-1]))


def check(got: torch.Tensor, x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> None:
    assert got.shape == (*x.shape[:-1], w.n)
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    u = multiplied(x, w.dense.shape[1])
    dense = w.dense if x[..., :1].numel() < AMX_ROWS else w.rounded
    want = u @ dense.t() + (0.0 if bias is None else bias.double())
    # A part's sum is exact; float32 sums the parts, and the values' offset apart from them. AMX sums products.
    size = u.abs() @ (w.dense.abs() + 8 * 0.25).t() + (0.0 if bias is None else bias.double().abs())
    rounding = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}[x.dtype]
    least = torch.finfo(x.dtype).smallest_normal * rounding
    assert torch.all((got.double() - want).abs() <= want.abs() * rounding + size * 2.0**-20 + least)


def check_error(linear: Callable[[torch.Tensor], torch.Tensor], dense: torch.Tensor) -> None:
    """Results are those of float64, but for rounding x to int8 and, with AMX, x and the weight to bfloat16."""
    x = torch.randn(64, dense.shape[1], generator=torch.Generator().manual_seed(1))
    with_outliers = x.clone()
    with_outliers[:, 5::256] *= 50
    for rows in (x, with_outliers):
        want = rows.double() @ dense.t()

        def error(count: int, rows: torch.Tensor = rows, want: torch.Tensor = want) -> float:
            """Root mean square of the errors, of that of results."""
            got = torch.cat([linear(rows[i : i + count]) for i in range(0, len(rows), count)])
            return float((got.double() - want).norm() / want.norm())

        few, many = error(16), error(64)
        assert few < 0.03
        if AMX_ROWS <= 64:
            assert many < min(2.0**-8, few)  # half a unit in each of two factors
        else:
            assert many == few


def test_error() -> None:
    w = Weight(48, 1024, 32, BF16)
    check_error(lambda x: linear(x, w), w.dense)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_w4a8_linear(data: st.DataObject) -> None:
    draw = data.draw
    group = draw(st.sampled_from(GROUPS))
    n, k = draw(st.integers(1, 150)), group * draw(st.integers(1, max(1, 512 // group)))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    w = Weight(n, k, group, draw(st.sampled_from([F32, BF16, F16])), draw(st.integers(0, 99)), draw(st.booleans()))
    width = k - draw(st.integers(0, group - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = drawn_rows(draw, random, draw(st.integers(0, 20) | st.integers(21, 90)), width)
    bias = draw(st.sampled_from([None, random(n), random(2 * n)[::2]]))
    check(linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize("scales", [F32, BF16, F16])
@pytest.mark.parametrize("group", GROUPS)
def test_rows_and_groups(group: int, scales: torch.dtype) -> None:
    for n in (15, 16, 17, 64, 130):
        w = Weight(n, 256, group, scales, seed=n)
        for m in (1, 2, 3, 4, 5, 6, 7, 13, 64):
            x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m))
            check(linear(x, w), x, w)


@pytest.mark.parametrize("scales", [F32, BF16, F16])
@pytest.mark.parametrize("group", GROUPS)
def test_without_zeros_results_are_those_with_zeros_of_0(group: int, scales: torch.dtype) -> None:
    for n in (15, 64, 130):
        w, same = Weight(n, 512, group, scales, seed=n, symmetric=True), Weight(n, 512, group, scales, seed=n)
        assert w.scales.shape[2] == 1
        same.packed, same.scales = w.packed, torch.nn.functional.pad(w.scales, (0, 0, 0, 1))
        for m in (1, 2, 3, 6, 7, 64):
            x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m))
            got = linear(x, w)
            assert torch.equal(got, linear(x, same))
            check(got, x, w)


def test_the_largest_sums() -> None:
    """Every product at its extreme, of both signs: nothing saturates on the way."""
    for q in (0, 15):
        w = Weight(32, 256, 256)
        w.values = torch.full((32, 256), q)
        scales = torch.tensor([1.0, 8.0]).expand(32, 1, 2)
        w.packed, w.scales = pack(w.values, scales)
        for sign in (1.0, -1.0):
            for m in (7, 40):
                x = torch.full((m, 256), 127.0 * sign)
                assert torch.equal(linear(x, w), torch.full((m, 32), 127.0 * sign * q * 256))


def test_every_value_of_four_bits() -> None:
    w = Weight(16, 32, 32)
    w.values = (torch.arange(16 * 32) * 7 % 16).reshape(16, 32)
    w.packed, w.scales = pack(w.values, torch.tensor([0.5, 0.25]).expand(16, 1, 2))
    x = 127.0 * torch.eye(32)
    want = ((w.values.t() - 8) * 0.5 + 0.25) * 127
    assert torch.equal(linear(x, w), want)
    for k in range(32):
        assert torch.equal(linear(x[k : k + 1], w), want[k : k + 1])


@pytest.mark.parametrize("m", [6, 40])
def test_rows_that_are_not_finite_or_tiny(m: int) -> None:
    w = Weight(20, 64, 32)
    x = torch.randn(m, 64)
    clean = linear(x, w)
    x[1, 40], x[2, 3], x[4, 63] = NAN, INF, -INF
    got = linear(x, w)
    assert torch.isnan(got).all(1).nonzero().flatten().tolist() == [1, 2, 4]
    finite = ~torch.isnan(got).any(1)
    assert finite.sum() == m - 3
    assert torch.equal(got[finite], clean[finite])
    tiny = torch.full((m, 64), 1e-42)
    assert torch.isfinite(linear(tiny, w)).all()
    assert torch.equal(linear(torch.zeros(m, 64), w), torch.zeros(m, 20))
    huge = torch.full((m, 64), 3e35)
    check(linear(huge, w), huge, w)


@pytest.mark.parametrize("scale", [65504.0, 6e-8, 1e-5])
def test_scales_of_float16(scale: float) -> None:
    """Subnormal numbers and the largest."""
    w = Weight(8, 32, 32)
    w.values = torch.full((8, 32), 9)
    w.packed, w.scales = pack(w.values, torch.tensor([scale, 0.0], dtype=F16).expand(8, 1, 2))
    got = linear(torch.full((1, 32), 127.0), w)
    torch.testing.assert_close(got, torch.full((1, 8), float(torch.tensor(scale, dtype=F16)) * 32 * 127))


def check_rows(
    linear: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    rows: Iterable[int],
    counts: Iterable[int],
) -> torch.Tensor:
    """The result of ``x``, which has the bits of each of the rows alone, and of the first ``counts``. With AMX it has
    those of as many others as AMX multiplies.
    """
    whole = linear(x)
    fewest = AMX_ROWS if len(x) >= AMX_ROWS else 1
    for row in rows:
        assert torch.equal(linear(x.roll(-row, 0)[:fewest])[0], whole[row])
    for count in counts:
        if count >= fewest:
            assert torch.equal(linear(x[:count]), whole[:count])
    return whole


@pytest.mark.parametrize("m", [31, 45])
def test_a_row_alone_gives_what_it_gives_among_others(m: int) -> None:
    w = Weight(200, 512, 64, BF16)
    check_rows(lambda some: linear(some, w), torch.randn(m, 512), range(m), (2, 3, 4, 5, 6, 11, m - 12, m - 1))


@pytest.mark.parametrize(("k", "group"), [(1056, 32), (2304, 256), (8192, 128)])
def test_many_rows_of_many_parts(k: int, group: int) -> None:
    """Several blocks of K and M."""
    w = Weight(33, k, group, BF16)
    x = torch.randn(290, k - 7, generator=torch.Generator().manual_seed(k))
    whole = check_rows(lambda some: linear(some, w), x, (0, 15, 16, 127, 128, 255, 256, 289), (15, 16, 17, 33, 49))
    check(whole, x, w)


SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
import torch, hashlib
from tests.native.{module} import Weight, linear
w = Weight({weight})
x = torch.randn(140, 1024, generator=torch.Generator().manual_seed(1))
for m in (1, 7, 140):
    print(hashlib.sha256(linear(x[:m], w).numpy().tobytes()).hexdigest())
"""


def check_threads(module: str, weight: str) -> None:
    """``linear`` of a module of tests gives the same bits for any number of threads."""
    outputs = set()
    for threads in ("1", "2", "5"):
        env = {**os.environ, "OMP_NUM_THREADS": threads, "UNTORCH_LIBRARY": library_path()}
        command = [sys.executable, "-c", SCRIPT.format(module=module, weight=weight), str(ROOT)]
        outputs.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3


@pytest.mark.slow
@pytest.mark.unsanitized
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    check_threads("test_w4a8", "1030, 1024, 64, torch.bfloat16")


def operands(**changed: Any) -> list[Any]:
    w = Weight(20, 64, 32)
    base = {"x": torch.ones(3, 64), "weight": w.packed, "scales": w.scales, "group": 32, "n": 20, "bias": None}
    given = base | changed
    return [given["x"], given["weight"], given["scales"], given["group"], given["n"], Opt(given["bias"])]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": None}, "argument 'x' is null"),
        ({"weight": None}, "argument 'weight' is null"),
        ({"scales": None}, "argument 'scale_and_zero' is null"),
        ({"x": torch.ones(3, 64).double()}, "argument 'x' must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.tensor(1.0)}, "argument 'x' must have at least one dimension, got shape []"),
        ({"x": torch.ones(64, 3).t()},
         "argument 'x' must have a contiguous last dimension, got shape [3, 64] with strides [1, 3]"),
        ({"n": -1}, "out_features must not be negative, got -1"),
        ({"group": 16}, "argument 'group_size' must be 32, 64, 128 or 256, got 16"),
        ({"weight": torch.ones(2, 8, 16)}, "argument 'weight' must be int32, got float32"),
        ({"weight": torch.ones(2, 8, 8, dtype=torch.int32)},
         "argument 'weight' must be contiguous of shape [2, 8, 16] for 64 features, 20 outputs and groups of 32, got "
         "shape [2, 8, 8] with strides [64, 8, 1]"),
        ({"weight": torch.ones(2, 16, 8, dtype=torch.int32).mT}, "with strides [128, 1, 8]"),
        ({"x": torch.ones(3, 65)}, "argument 'weight' must be contiguous of shape [2, 12, 16] for 65 features"),
        ({"scales": torch.ones(2, 2, 2, 16).double()},
         "argument 'scale_and_zero' must be float32, bfloat16 or float16, got float64"),
        ({"scales": torch.ones(2, 2, 16, 2)}, "argument 'scale_and_zero' must be contiguous of shape [2, 2, 2, 16]"),
        ({"scales": torch.ones(2, 2, 1, 8)}, "argument 'scale_and_zero' must be contiguous of shape [2, 2, 1, 16]"),
        ({"bias": torch.ones(19)}, "argument 'bias' must have shape [20], got [19]"),
        ({"bias": torch.ones(20, dtype=BF16)}, "argument 'bias' must be float32 like 'x', got bfloat16"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("aoti_torch_cpu_w4a8_linear", *operands(**changed), returns=1)
    assert str(error.value).startswith("w4a8_linear: ")
    assert text in str(error.value)


def test_no_place_for_the_result() -> None:
    with pytest.raises(ShimError, match="^w4a8_linear: output pointer is null$"):
        call("aoti_torch_cpu_w4a8_linear", *operands(), None)


def test_no_rows_no_columns_and_no_features() -> None:
    w = Weight(16, 64, 32)
    assert linear(torch.ones(2, 0, 64), w).shape == (2, 0, 16)
    w.n, w.packed, w.scales = 0, w.packed[:0], w.scales[:0]
    assert linear(torch.ones(3, 64), w).shape == (3, 0)
    w.n, w.packed, w.scales = 5, torch.zeros(1, 0, 16, dtype=torch.int32), torch.zeros(1, 0, 2, 16)
    bias = torch.randn(5)
    assert torch.equal(linear(torch.ones(3, 0), w, bias), bias.expand(3, 5))
