"""The int4 linear layer on the CPU against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.int4_weights import Args, linear_refusals, pack, random_weight
from tests.native.operands import drawn_rows
from tests.native.shim import ROOT, Opt, ShimError, call, library_path

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GROUPS, TILES = [32, 64, 128, 256], [2, 4, 8]
# Of a value, by the rounding of its dtype; of the sum of magnitudes, by float32 sums.
ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}


def linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, group: int, bias: torch.Tensor | None
) -> torch.Tensor:
    got: torch.Tensor = call("aoti_torch_cpu_int4_linear", x, weight, scales, group, Opt(bias), returns=1)
    return got


def check(got: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> None:
    """got against x · denseᵀ + bias in float64, dense as wide as x."""
    assert got.shape == (*x.shape[:-1], dense.shape[0])
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    added = 0.0 if bias is None else bias.double()
    want = x.double() @ dense.t() + added
    size = x.double().abs() @ dense.abs().t() + (0.0 if bias is None else bias.double().abs())
    least = torch.finfo(x.dtype).smallest_normal * ROUNDING[x.dtype]  # below it float16 rounds to fixed steps
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[x.dtype] + size * 2.0**-18 + least)


def test_pack_is_the_documented_layout() -> None:
    values = torch.randint(0, 16, (16, 256))
    for tiles in TILES:
        words = pack(values, tiles)
        for i, o, lane, j in [(0, 0, 0, 0), (1, 0, 31, tiles // 2 - 1), (1, words.shape[1] - 1, 13, 0)]:
            for p in range(4):
                for h in range(2):
                    nibble = (int(words[i, o, lane, j]) >> 4 * (p + 4 * h)) & 15
                    k = 16 * tiles * o + 32 * j + 2 * (lane % 4) + 8 * p + h
                    assert nibble == values[8 * i + lane // 4, k]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_int4_linear(data: st.DataObject) -> None:
    draw = data.draw
    group, tiles = draw(st.sampled_from(GROUPS)), draw(st.sampled_from(TILES))
    step = max(group, 16 * tiles)
    n, k = 8 * draw(st.integers(1, 20)), step * draw(st.integers(1, 768 // step))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    w = random_weight(n, k, group, tiles, draw(st.sampled_from([F32, BF16, F16])), draw(st.integers(0, 99)))
    width = k if draw(st.booleans()) else draw(st.integers(0, k))
    m = draw(st.integers(0, 40) | st.integers(41, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = drawn_rows(draw, random, m, width)
    bias = draw(st.sampled_from([None, random(n), random(2 * n)[::2]]))
    check(linear(x, w.packed, w.scales, group, bias), x, w.dense[:, :width], bias)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 64, 129, 300])
def test_rows_groups_and_tiles(m: int, group: int, tiles: int) -> None:
    w = random_weight(136, 768, group, tiles)
    x = torch.randn(m, 768, generator=torch.Generator().manual_seed(m))
    check(linear(x, w.packed, w.scales, group, None), x, w.dense, None)


@pytest.mark.parametrize(("n", "k"), [(8, 32), (24, 96), (4096, 256), (264, 4096)])
def test_sizes(n: int, k: int) -> None:
    w = random_weight(n, k, 32, 2)
    for m in (1, 6, 33):
        x, bias = torch.randn(m, k).to(BF16), torch.randn(n).to(BF16)
        check(linear(x, w.packed, w.scales, 32, bias), x, w.dense, bias)


def test_every_value_of_four_bits() -> None:
    values = (torch.arange(8 * 256) * 7 % 16).reshape(8, 256)
    scales = torch.stack([torch.full((1, 8), 0.5), torch.full((1, 8), 0.25)], dim=-1)
    want = ((values - 8) * 0.5 + 0.25).t().contiguous()
    for m in (256, 8):
        got = torch.cat([linear(part, pack(values), scales, 256, None) for part in torch.eye(256).reshape(-1, m, 256)])
        assert torch.equal(got, want)


@pytest.mark.parametrize("scale", [65504.0, 6e-8, 1e-5, float("inf"), float("nan")])
def test_scales_of_float16(scale: float) -> None:
    """Subnormal numbers, the largest and those that are none."""
    scales = torch.tensor([scale, 0.0], dtype=F16).expand(1, 8, 2).contiguous()
    for m in (1, 32):
        got = linear(torch.ones(m, 32), pack(torch.full((8, 32), 9), 2), scales, 32, None)
        want = scales[0, :, 0].float().expand(m, 8) * 32
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.unsanitized
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, hashlib\n"
        "from tests.native.int4_weights import random_weight\n"
        "from tests.native.shim import Opt, call\n"
        "w = random_weight(1024, 1024, 64)\n"
        "x = torch.randn(40, 1024, generator=torch.Generator().manual_seed(1))\n"
        "for m in (1, 7, 40):\n"
        "    y = call('aoti_torch_cpu_int4_linear', x[:m], w.packed, w.scales, 64, Opt(None), returns=1)\n"
        "    print(hashlib.sha256(y.numpy().tobytes()).hexdigest())\n"
    )
    outputs = set()
    for threads in ("1", "2", "3"):
        env = {**os.environ, "OMP_NUM_THREADS": threads, "UNTORCH_LIBRARY": library_path()}
        command = [sys.executable, "-c", script, str(ROOT)]
        outputs.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("args", "expected"), linear_refusals(zeros))
def test_refusals(args: Args, expected: str) -> None:
    with pytest.raises(ShimError) as error:
        call("aoti_torch_cpu_int4_linear", *args[:4], Opt(args[4]), returns=1)
    assert str(error.value) == expected


def test_no_place_for_the_result() -> None:
    w = random_weight(8, 32, 32, 2)
    with pytest.raises(ShimError, match="^int4_linear: output pointer is null$"):
        call("aoti_torch_cpu_int4_linear", torch.ones(1, 32), w.packed, w.scales, 32, Opt(None), None)


def test_no_rows_and_no_columns() -> None:
    w = random_weight(16, 64, 32, 4)
    assert linear(torch.ones(2, 0, 64), w.packed, w.scales, 32, None).shape == (2, 0, 16)
    assert linear(torch.ones(3, 64), w.packed[:0], w.scales[:, :0].contiguous(), 32, None).shape == (3, 0)
