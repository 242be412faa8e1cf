"""NVFP4's codes and layouts: each code's value, nibbles and tiles by their definitions, and exact round trips."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from untorch.ops.int4_layout import unpack_int4
from untorch.ops.nvfp4_layout import (
    E2M1_VALUES,
    dequantize_nvfp4,
    e2m1_values,
    pack_nvfp4,
    pack_nvfp4_tiles,
    unpack_nvfp4,
    unpack_nvfp4_tiles,
)
from untorch.runtime.errors import InvalidArgumentError


def value_of(code: int) -> float:
    """By the bits: sign, two of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_code(dtype: torch.dtype) -> None:
    values = e2m1_values(torch.arange(16, dtype=torch.uint8), dtype)
    assert values.dtype == dtype
    assert values.double().tolist() == [value_of(code) for code in range(16)] == list(E2M1_VALUES)
    assert values.double()[8].signbit()


@hypothesis.given(
    shape=st.lists(st.integers(0, 4), max_size=3), half=st.integers(0, 20), kind=st.sampled_from(["uint8", "int64"]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@hypothesis.settings(deadline=None, max_examples=40)
def test_nibbles(shape: list[int], half: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*shape, 2 * half), generator=generator).to(getattr(torch, kind))
    packed = pack_nvfp4(codes)
    assert (packed.dtype, packed.shape) == (torch.uint8, (*shape, half))
    even, odd = codes.long().unflatten(-1, (half, 2)).unbind(-1)
    assert torch.equal(packed.long(), even + 16 * odd)
    assert torch.equal(unpack_nvfp4(packed), codes.to(torch.uint8))


@hypothesis.given(
    tiles=st.integers(1, 3), outer=st.integers(1, 3), inner=st.sampled_from([2, 4, 8]), seed=st.integers(0, 2**31)
)
@hypothesis.settings(deadline=None, max_examples=30)
def test_tiles_hold_the_same_codes(tiles: int, outer: int, inner: int, seed: int) -> None:
    n, k = 8 * tiles, 16 * inner * outer
    packed = torch.randint(0, 256, (n, k // 2), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    made = pack_nvfp4_tiles(packed, inner)
    assert (made.dtype, made.shape) == (torch.int32, (tiles, outer, 32, inner // 2))
    assert torch.equal(unpack_int4(made), unpack_nvfp4(packed))
    assert torch.equal(unpack_nvfp4_tiles(made), packed)


SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all that are finite and not negative


def test_every_value_with_every_block_scale_is_exact_in_float64_and_rounded_once_in_float32() -> None:
    packed = pack_nvfp4(torch.arange(16)).repeat(127, 1)
    exact = torch.tensor(E2M1_VALUES, dtype=torch.float64) * SCALES.double()[:, None]
    for factor in (1.0, 2.0**-126, 0.1, 3.0e35):
        scale = torch.tensor(factor)
        wide = exact * scale.double()
        assert torch.equal(dequantize_nvfp4(packed, SCALES[:, None], scale, torch.float64), wide)
        assert torch.equal(dequantize_nvfp4(packed, SCALES[:, None], scale), wide.float())
        half = dequantize_nvfp4(packed, SCALES[:, None], scale, torch.bfloat16)
        assert torch.equal(half, wide.float().bfloat16())


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_global_scales_of_matrices_and_of_rows(batch: tuple[int, ...]) -> None:
    packed = torch.randint(0, 256, (*batch, 8, 64)).to(torch.uint8)
    scales = SCALES[torch.randint(0, 127, (*batch, 8, 8))]
    plain = dequantize_nvfp4(packed, scales, torch.ones(batch), torch.float64)
    for shape in (batch, (*batch, 1), (*batch, 8)):
        factor = torch.rand(shape)
        expected = plain * factor.double().reshape(*batch, -1, 1)
        assert torch.equal(dequantize_nvfp4(packed, scales, factor, torch.float64), expected)
    if not batch:
        tiles = pack_nvfp4_tiles(packed, 4)
        assert torch.equal(dequantize_nvfp4(tiles, scales, torch.ones(()), torch.float64), plain)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_nvfp4(torch.ones(3, 3).int()), "codes: expected integers [..., k] with an even k, got int32 [3, 3]"),
        (lambda: pack_nvfp4(torch.ones(3, 4)), "codes: expected integers [..., k] with an even k, got float32 [3, 4]"),
        (lambda: pack_nvfp4(torch.tensor(1)), "got int64 []"),
        (lambda: pack_nvfp4(torch.tensor([3, 16])), "pack_nvfp4: codes: expected 0 to 15, got 3 to 16"),
        (lambda: pack_nvfp4(torch.tensor([3, -1])), "pack_nvfp4: codes: expected 0 to 15, got -1 to 3"),
        (lambda: unpack_nvfp4(torch.ones(4)), "unpack_nvfp4: packed: expected uint8 [..., k / 2], got float32 [4]"),
        (
            lambda: pack_nvfp4_tiles(torch.zeros(8, 32, dtype=torch.uint8)),
            "pack_nvfp4_tiles: packed: expected uint8 [n, k / 2] with n a multiple of 8 and k of 128 (16 · "
            "inner_k_tiles), got uint8 [8, 32]",
        ),
        (lambda: pack_nvfp4_tiles(torch.zeros(9, 64, dtype=torch.uint8)), "got uint8 [9, 64]"),
        (lambda: pack_nvfp4_tiles(torch.zeros(8, 24, dtype=torch.uint8), 3), "inner_k_tiles: expected 2, 4 or 8, got 3"),
        (lambda: unpack_nvfp4_tiles(torch.zeros(1, 1, 32)), "unpack_int4: packed: expected int32 [n / 8]"),
        (
            lambda: dequantize_nvfp4(torch.zeros(2, 4, dtype=torch.uint8), SCALES[:2, None], torch.ones(())),
            "dequantize_nvfp4: packed: expected uint8 [..., n, k / 2] with k a multiple of 16, got uint8 [2, 4]",
        ),
        (
            lambda: dequantize_nvfp4(torch.zeros(2, 8, dtype=torch.uint8), SCALES[:2], torch.ones(())),
            "dequantize_nvfp4: block_scale: expected float8_e4m3fn [2, 1], got float8_e4m3fn [2]",
        ),
        (
            lambda: dequantize_nvfp4(torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1), torch.ones(())),
            "dequantize_nvfp4: block_scale: expected float8_e4m3fn [2, 1], got float32 [2, 1]",
        ),
        (
            lambda: dequantize_nvfp4(torch.zeros(2, 8, dtype=torch.uint8), SCALES[:2, None], torch.ones(3)),
            "dequantize_nvfp4: global_scale: expected float32 [] or [1] or [2], got float32 [3]",
        ),
        (
            lambda: dequantize_nvfp4(torch.zeros(2, 8, dtype=torch.uint8), SCALES[:2, None], torch.ones(2).double()),
            "got float64 [2]",
        ),
    ],
)  # fmt: skip
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        call()
    assert text in str(error.value)
