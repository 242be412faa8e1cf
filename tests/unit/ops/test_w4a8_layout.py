"""The layout of weights of four bits for integers: where each value lies, and its inverse."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.ops.w4a8_layout import pack_nvfp4_w4a8, pack_w4a8, unpack_nvfp4_w4a8, unpack_w4a8


@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from([32, 64]), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_pack_and_unpack(n: int, groups: int, group: int, seed: int) -> None:
    generator, k = torch.Generator().manual_seed(seed), groups * group
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randn(groups, n, 2, generator=generator).to(torch.bfloat16)
    weight, packed = pack_w4a8(values, scales)
    panels = -(-n // 16)
    assert (weight.shape, packed.shape) == ((panels, k // 8, 16), (panels, groups, 2, 16))
    assert weight.is_contiguous()
    assert packed.is_contiguous()
    for row in range(panels * 16):
        for column in range(k):
            byte = (int(weight[row // 16, column // 8, row % 16]) >> 8 * (column % 4)) & 255
            value = byte >> 4 if column % 8 >= 4 else byte & 15
            assert value == (values[row, column] if row < n else 0)
        for g in range(groups):
            expected = scales[g, row] if row < n else torch.zeros(2)
            assert torch.equal(packed[row // 16, g, :, row % 16], expected.to(torch.bfloat16))
    back = unpack_w4a8(weight, packed, n)
    assert torch.equal(back[0], values)
    assert torch.equal(back[1], scales)


def test_zeros_of_0_are_left_out() -> None:
    values, scales = torch.randint(0, 16, (20, 64), dtype=torch.uint8), torch.randn(2, 20, 2)
    scales[..., 1] = 0
    weight, packed = pack_w4a8(values, scales)
    assert (packed.shape, packed.is_contiguous()) == ((2, 2, 1, 16), True)
    back = unpack_w4a8(weight, packed, 20)
    assert torch.equal(back[0], values)
    assert torch.equal(back[1], scales)
    scales[1, 19, 1] = 1e-3
    assert pack_w4a8(values, scales)[1].shape == (2, 2, 2, 16)


def test_many_rows_are_packed_in_pieces() -> None:
    values = torch.randint(0, 16, (4096 + 33, 32), dtype=torch.uint8)
    weight, packed = pack_w4a8(values, torch.randn(1, 4129, 2))
    assert torch.equal(unpack_w4a8(weight, packed, 4129)[0], values)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_pack_and_unpack_nvfp4(n: int, parts: int, seed: int) -> None:
    generator, k = torch.Generator().manual_seed(seed), 32 * parts
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=generator)
    weight, packed = pack_nvfp4_w4a8(codes, scales.view(torch.float8_e4m3fn))
    assert torch.equal(weight, pack_w4a8(codes, torch.zeros(parts, n, 2))[0])
    panels = -(-n // 16)
    assert (packed.shape, packed.dtype) == ((panels, k // 16, 16), torch.float8_e4m3fn)
    assert packed.is_contiguous()
    by_row = packed.view(torch.uint8)
    for row in range(panels * 16):
        expected = scales[row] if row < n else torch.zeros(k // 16, dtype=torch.uint8)
        assert torch.equal(by_row[row // 16, :, row % 16], expected)
    back = unpack_nvfp4_w4a8(weight, packed, n)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1].view(torch.uint8), scales)
