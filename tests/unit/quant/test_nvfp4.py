"""NVFP4 from weights: against definitions written out block by block, exact round trips, and what holds for any."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from untorch.ops import chunks
from untorch.ops.nvfp4_layout import E2M1_VALUES, pack_nvfp4, unpack_nvfp4
from untorch.quant import nvfp4
from untorch.quant.nvfp4 import (
    NVFP4Weight,
    concatenate_nvfp4,
    nvfp4_error,
    quantize_nvfp4,
    quantize_nvfp4_errors,
    reconcile_nvfp4,
)
from untorch.runtime.errors import InvalidArgumentError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all that are finite and not negative
SIZES = E2M1_VALUES[:8]


def nearest(value: float) -> float:
    """The nearest value of E2M1, of two the one whose code is even."""
    size = min(abs(value), 6.0)
    distances = [abs(size - each) for each in SIZES]
    best = [code for code in range(8) if distances[code] == min(distances)]
    code = best[0] if len(best) == 1 else next(code for code in best if code % 2 == 0)
    return math.copysign(SIZES[code], value) if code else 0.0


def exact(quantized: NVFP4Weight, k: int) -> torch.Tensor:
    return quantized.dequantize(torch.float64)[..., :k]


def squared_errors(weight: torch.Tensor, quantized: NVFP4Weight) -> torch.Tensor:
    """Of each block, in float64."""
    k = weight.shape[-1]
    padded = torch.nn.functional.pad(exact(quantized, k) - weight.double(), (0, -k % 16))
    return padded.unflatten(-1, (-1, 16)).square().sum(-1)


def random_weight(shape: tuple[int, ...], dtype: torch.dtype, spread: float, seed: int) -> torch.Tensor:
    """Values whose sizes differ by up to 10 ** spread, some of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (spread * (torch.rand(shape, generator=generator) - 0.5))
    zeros = torch.rand(shape, generator=generator) < 0.1
    return (torch.randn(shape, generator=generator) * size * 0.05).masked_fill(zeros, 0.0).to(dtype)


@hypothesis.given(
    n=st.integers(1, 6), k=st.integers(1, 70), dtype=st.sampled_from(DTYPES), spread=st.sampled_from([0.0, 2.0, 6.0]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@hypothesis.settings(deadline=None, max_examples=60)
def test_rounding_to_nearest_block_by_block(n: int, k: int, dtype: torch.dtype, spread: float, seed: int) -> None:
    weight = random_weight((n, k), dtype, spread, seed)
    made = quantize_nvfp4(weight, search=False)
    largest = float(weight.float().abs().max())
    scale = torch.tensor(largest / (6 * 448) or 1.0)
    assert torch.allclose(made.global_scale, scale, rtol=2**-23, atol=0)
    blocks = torch.nn.functional.pad(weight.float(), (0, -k % 16)).unflatten(-1, (-1, 16)) / made.global_scale
    largest_of_block = blocks.abs().amax(-1)
    expected = (largest_of_block / 6).to(torch.float8_e4m3fn).float()
    expected[(expected == 0) & (largest_of_block > 0)] = 2.0**-9
    assert torch.equal(made.block_scale.float(), expected)
    restored = unpack_nvfp4(made.packed).int()
    for code, value, size in zip(
        restored.flatten().tolist(), blocks.flatten().tolist(), expected.repeat_interleave(16, -1).flatten().tolist(),
        strict=True,
    ):  # fmt: skip
        quotient = float(torch.tensor(value) / torch.tensor(size)) if size else 0.0
        assert E2M1_VALUES[code] == nearest(quotient)
        assert code != 8


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 0.0123, 7.7e5])
def test_every_value_with_every_block_scale_comes_back(search: bool, factor: float) -> None:
    """A block that holds each code is stored as it was, if the global scale is given."""
    codes = torch.tensor([*range(8), 7, *range(9, 16)])
    scale = torch.tensor(factor)
    there = NVFP4Weight(pack_nvfp4(codes).repeat(126, 1), SCALES[1:, None].contiguous(), scale)
    back = quantize_nvfp4(there.dequantize(), search=search, global_scale=factor)
    assert torch.equal(back.packed, there.packed)
    assert torch.equal(back.block_scale.view(torch.uint8), there.block_scale.view(torch.uint8))
    assert torch.equal(back.global_scale, scale)


@hypothesis.given(scales=st.lists(st.integers(1, 126), min_size=1, max_size=6), seed=st.integers(0, 2**31))
@hypothesis.settings(deadline=None, max_examples=40)
def test_what_is_nvfp4_already_stays_and_finds_its_global_scale(scales: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (len(scales), 16), generator=generator)
    codes[codes == 8] = 0
    codes[:, 5] = 7  # each block has its largest value
    scales[-1] = 126  # and the matrix its largest scale
    factor = torch.rand((), generator=generator) + 0.01
    there = NVFP4Weight(pack_nvfp4(codes), SCALES[torch.tensor(scales)][:, None], factor)
    back = quantize_nvfp4(there.dequantize())
    assert torch.allclose(back.global_scale, factor, rtol=2**-22, atol=0)
    assert torch.equal(back.packed, there.packed)
    assert torch.equal(back.block_scale.view(torch.uint8), there.block_scale.view(torch.uint8))


@hypothesis.given(
    batch=st.sampled_from([(), (2,), (2, 3)]), n=st.integers(1, 5), k=st.integers(1, 80), dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.0, 1.0, 4.0, 12.0]), given=st.sampled_from([None, 1e-4, 0.3, 1e3]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@hypothesis.settings(deadline=None, max_examples=150)
def test_the_search_is_never_worse_than_rounding_to_nearest(
    batch: tuple[int, ...], n: int, k: int, dtype: torch.dtype, spread: float, given: float | None, seed: int
) -> None:
    weight = random_weight((*batch, n, k), dtype, spread, seed).nan_to_num()
    plain = quantize_nvfp4(weight, search=False, global_scale=given)
    searched = quantize_nvfp4(weight, global_scale=given)
    assert torch.equal(plain.global_scale, searched.global_scale)
    assert plain.packed.shape == searched.packed.shape == (*batch, n, -(-k // 16) * 8)
    assert plain.block_scale.shape == searched.block_scale.shape == (*batch, n, -(-k // 16))
    assert plain.global_scale.shape == batch
    # Equal up to float64's rounding where the search changed nothing.
    assert (squared_errors(weight, searched) <= squared_errors(weight, plain) * (1 + 1e-12)).all()
    assert torch.isfinite(searched.dequantize(torch.float64)).all()
    assert not (searched.block_scale.float() < 0).any()


def test_the_search_finds_the_best_scale_of_all() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    plain, searched = quantize_nvfp4(weight, search=False), quantize_nvfp4(weight)
    blocks = (weight / searched.global_scale).unflatten(1, (-1, 16))
    least = torch.full(blocks.shape[:2], math.inf)
    sizes = torch.tensor(SIZES)
    for scale in SCALES[1:].float():
        quotient = blocks.abs() / scale
        rounded = sizes[(quotient.unsqueeze(-1) - sizes).abs().argmin(-1)]
        least = torch.minimum(least, ((rounded - quotient) * scale).square().sum(-1))
    ours = squared_errors(weight, searched) / searched.global_scale.double() ** 2
    assert float((ours / least.double()).max()) < 1 + 1e-4
    assert nvfp4_error(weight, searched) < 0.9 * nvfp4_error(weight, plain)


@pytest.mark.parametrize("largest", [20, 30, 40])
def test_gains_that_only_float32_sees_are_none(largest: int) -> None:
    """Whole numbers have equally good scales, whose errors float32 finds different by 1e-7 of them."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-largest, largest + 1, (4000, 64), generator=generator).float()
    plain = quantize_nvfp4(weight, search=False, global_scale=0.3)
    searched = quantize_nvfp4(weight, global_scale=0.3)
    assert (squared_errors(weight, searched) <= squared_errors(weight, plain) * (1 + 1e-12)).all()


def test_ties_go_to_the_even_mantissa() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    made = quantize_nvfp4(torch.tensor([ties]), search=False, global_scale=1.0)
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert made.dequantize().tolist() == [expected + [-value for value in expected]]
    assert made.block_scale.float().tolist() == [[1.0]]


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_blocks_of_zeros(search: bool, dtype: torch.dtype) -> None:
    made = quantize_nvfp4(torch.zeros(3, 20, dtype=dtype), search=search)
    assert float(made.global_scale) == 1.0
    assert not made.packed.any()
    assert not made.block_scale.view(torch.uint8).any()
    weight = torch.zeros(2, 48, dtype=dtype)
    weight[0, 17] = -3.0
    made = quantize_nvfp4(weight, search=search)
    assert torch.equal(made.block_scale.float() == 0, torch.tensor([[True, False, True], [True, True, True]]))
    torch.testing.assert_close(made.dequantize(), weight.float(), rtol=1e-6, atol=0)
    assert nvfp4_error(weight, made) < 1e-6
    assert nvfp4_error(torch.zeros(2, 48), quantize_nvfp4(torch.zeros(2, 48))) == 0.0


@pytest.mark.parametrize("shape", [(6, 48), (3, 6, 40), (2, 2, 5, 32)])
@pytest.mark.parametrize("kernel", [True, False])
def test_errors_of_all_matrices(shape: tuple[int, ...], kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(shape) * torch.rand(*shape[:-2], 1, 1)
    expected = [quantize_nvfp4(weight), quantize_nvfp4(weight, search=False)]
    if not kernel:
        monkeypatch.setattr(nvfp4, "has_kernel", lambda weight: False)
    made, error, nearest = quantize_nvfp4_errors(weight, search=True)
    for name in ("packed", "block_scale", "global_scale"):
        assert torch.equal(getattr(made, name).float(), getattr(expected[0], name).float())
    for got, quantized in zip((error, nearest), expected, strict=True):
        difference = quantized.dequantize(torch.float64)[..., : shape[-1]] - weight.double()
        assert got == pytest.approx(float(difference.norm() / weight.double().norm()), rel=1e-5)
    assert quantize_nvfp4_errors(weight, search=False)[1:] == (pytest.approx(nearest), None)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e-45, torch.float32), (1e-40, torch.float32), (1e-30, torch.float32), (6e-8, torch.float16),
        (3.4028234663852886e38, torch.float32), (3.3e38, torch.bfloat16), (65504.0, torch.float16),
    ],
)  # fmt: skip
def test_the_ends_of_the_dtypes(value: float, dtype: torch.dtype, search: bool) -> None:
    weight = torch.tensor([[value, -value, value / 3, 0.0]], dtype=torch.float64).to(dtype)
    made = quantize_nvfp4(weight, search=search)
    restored = made.dequantize()
    assert torch.isfinite(restored).all()
    assert float(made.global_scale) >= torch.finfo(torch.float32).tiny
    assert float(restored[0, 0]) == pytest.approx(float(weight[0, 0]), rel=1e-6)
    assert float(restored[0, 1]) == -float(restored[0, 0])


def test_a_small_block_beside_a_large_one_keeps_what_the_least_scale_holds() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0] = 6 * 448.0
    weight[0, 16:19] = torch.tensor([0.0015, -0.001, 0.0002])  # below 6 · 2^-10: the scale would be rounded to 0
    made = quantize_nvfp4(weight, search=False)
    assert made.block_scale.float()[0, 1] == 2.0**-9
    assert made.dequantize()[0, 16:19].tolist() == [2.0**-9 * 1.0, -(2.0**-9) * 0.5, 0.0]


def test_global_scales_that_are_given() -> None:
    weight = torch.randn(2, 8, 32)
    scales = torch.tensor([0.01, 0.02])
    made = quantize_nvfp4(weight, global_scale=scales)
    assert torch.equal(made.global_scale, scales)
    for i in range(2):
        alone = quantize_nvfp4(weight[i], global_scale=float(scales[i]))
        assert torch.equal(made.packed[i], alone.packed)
        assert torch.equal(made.block_scale[i].float(), alone.block_scale.float())
    # Too small for the largest block scale: saturated, not infinite.
    small = quantize_nvfp4(weight[0], global_scale=1e-6)
    assert float(small.block_scale.float().max()) == 448.0
    assert float(small.dequantize().abs().max()) == pytest.approx(6 * 448e-6)


@pytest.mark.parametrize("search", [False, True])
def test_chunks_threads_and_strides_do_not_matter(search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 37).T  # [37, 48], not contiguous
    whole = quantize_nvfp4(weight, search=search)
    monkeypatch.setattr(chunks, "_CHUNK", 1)
    parts = quantize_nvfp4(weight.contiguous(), search=search)
    for a, b in zip(vars(whole).values(), vars(parts).values(), strict=True):
        assert torch.equal(a.float(), b.float())
    assert nvfp4_error(weight, whole) == pytest.approx(nvfp4_error(weight, parts), rel=1e-12)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 4, 16)])
def test_weights_without_values(shape: tuple[int, ...]) -> None:
    made = quantize_nvfp4(torch.zeros(shape))
    assert made.packed.shape == (*shape[:-1], shape[-1] // 2)
    assert made.dequantize().shape == shape


def gate_and_up(batch: tuple[int, ...] = ()) -> list[tuple[torch.Tensor, NVFP4Weight]]:
    torch.manual_seed(1)
    weights = [torch.randn(*batch, 8, 32), 0.31 * torch.randn(*batch, 12, 32), 0.05 * torch.randn(*batch, 8, 32)]
    return [(weight, quantize_nvfp4(weight)) for weight in weights]


@pytest.mark.parametrize("batch", [(), (3,)])
def test_reconciled_weights_have_the_largest_global_scale_and_block_scales_rounded_once(batch: tuple[int, ...]) -> None:
    pairs = gate_and_up(batch)
    made = reconcile_nvfp4([quantized for _, quantized in pairs])
    largest = torch.stack([quantized.global_scale for _, quantized in pairs]).amax(0)
    for (weight, before), after in zip(pairs, made, strict=True):
        assert torch.equal(after.global_scale, largest)
        assert torch.equal(after.packed, before.packed)
        wanted = before.block_scale.double() * (before.global_scale / largest).double()[..., None, None]
        distances = (SCALES.double() - wanted.unsqueeze(-1)).abs()
        chosen = (after.block_scale.double() - wanted).abs()
        assert (chosen <= distances.amin(-1) + 1e-6 * wanted).all()
        restored = after.dequantize() - weight
        assert float(restored.norm() / weight.norm()) < 0.12
    assert torch.equal(made[0].block_scale.float(), pairs[0][1].block_scale.float()) or batch


def test_powers_of_two_are_reconciled_without_loss() -> None:
    codes = pack_nvfp4(torch.arange(16)).repeat(2, 1)
    weights = [
        NVFP4Weight(codes, SCALES[torch.tensor([[72], [100]])], torch.tensor(scale)) for scale in (0.5, 4.0, 1.0)
    ]
    for before, after in zip(weights, reconcile_nvfp4(weights), strict=True):
        assert torch.equal(after.dequantize(), before.dequantize())
        assert float(after.global_scale) == 4.0
    one = NVFP4Weight(codes, SCALES[torch.tensor([[72], [100]])], torch.tensor([4.0]))
    assert float(reconcile_nvfp4([one])[0].global_scale) == 4.0
    # Weights of zeros, as others may store them.
    zeros = [NVFP4Weight(codes, SCALES[torch.tensor([[72], [100]])], torch.tensor(0.0)) for _ in range(2)]
    assert not any(after.dequantize().any() for after in reconcile_nvfp4(zeros))
    assert reconcile_nvfp4([]) == []


@pytest.mark.parametrize("batch", [(), (3,)])
def test_concatenated_weights_lose_nothing(batch: tuple[int, ...]) -> None:
    parts = [quantized for _, quantized in gate_and_up(batch)]
    whole = concatenate_nvfp4(parts)
    assert whole.global_scale.shape == (*batch, 28)
    expected = torch.cat([part.dequantize(torch.float64) for part in parts], -2)
    assert torch.equal(whole.dequantize(torch.float64), expected)
    assert torch.equal(concatenate_nvfp4([whole, parts[0]]).dequantize()[..., :28, :], whole.dequantize())


def refuses(call: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        call()
    assert text in str(error.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(3, 20, dtype=dtype)
    weight[1, 19] = value
    refuses(lambda: quantize_nvfp4(weight), "quantize_nvfp4: weight: it has values that are not finite")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: quantize_nvfp4(torch.ones(16)),
            "quantize_nvfp4: weight: expected float32, bfloat16 or float16 [..., n, k], got float32 [16]",
        ),
        (lambda: quantize_nvfp4(torch.ones(2, 16).double()), "got float64 [2, 16]"),
        (lambda: quantize_nvfp4(torch.ones(2, 16).int()), "got int32 [2, 16]"),
        (
            lambda: quantize_nvfp4(torch.ones(2, 2, 16), global_scale=torch.ones(3)),
            "quantize_nvfp4: global_scale: expected one number or [2], got [3]",
        ),
        (
            lambda: quantize_nvfp4(torch.ones(2, 16), global_scale=0.0),
            "quantize_nvfp4: global_scale: expected finite float32 above 0, got 0.0",
        ),
        (lambda: quantize_nvfp4(torch.ones(2, 16), global_scale=-1.0), "got -1.0"),
        (lambda: quantize_nvfp4(torch.ones(2, 16), global_scale=math.nan), "got nan"),
        (lambda: quantize_nvfp4(torch.ones(2, 16), global_scale=1e39), "expected finite float32 above 0, got 1e+39"),
        (
            lambda: reconcile_nvfp4([concatenate_nvfp4([gate_and_up()[0][1]])]),
            "reconcile_nvfp4: weights: expected one global scale for each matrix, and the same number of matrices, got "
            "global scales [8] for packed [8, 16]",
        ),
        (
            lambda: reconcile_nvfp4([gate_and_up()[0][1], gate_and_up((3,))[0][1]]),
            "got global scales [3] for packed [3, 8, 16]",
        ),
        (lambda: concatenate_nvfp4([]), "expected one or more that differ in n only, got packed none"),
        (
            lambda: concatenate_nvfp4([quantize_nvfp4(torch.ones(2, 16)), quantize_nvfp4(torch.ones(2, 32))]),
            "concatenate_nvfp4: weights: expected one or more that differ in n only, got packed [2, 8], [2, 16]",
        ),
    ],
)
def test_errors(call: Any, text: str) -> None:
    refuses(call, text)
