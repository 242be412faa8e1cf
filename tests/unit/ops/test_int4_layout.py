"""The int4 layout: round trips, an element map that is derived from the tensor core's operand, and its errors."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from untorch.ops import chunks
from untorch.ops.int4_layout import nibbles_to_values, pack_int4, unpack_int4, values_to_nibbles
from untorch.runtime.errors import InvalidArgumentError

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.sampled_from([2, 4, 8]))


def values_of(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@hypothesis.given(sizes, st.integers(0, 2**31))
@hypothesis.settings(deadline=None, max_examples=40)
def test_unpacking_is_the_inverse(size: tuple[int, int, int], seed: int) -> None:
    tiles, outer, inner = size
    values = values_of(8 * tiles, 16 * inner * outer, seed)
    packed = pack_int4(values, inner)
    assert packed.dtype == torch.int32
    assert packed.shape == (tiles, outer, 32, inner // 2)
    assert packed.is_contiguous()
    assert torch.equal(unpack_int4(packed), values)
    # and every word is the packing of something
    words = torch.randint(-(2**31), 2**31, packed.shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(pack_int4(unpack_int4(words.int()), inner), words.int())


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_aten_gives_that_shape(inner: int) -> None:
    values = values_of(24, 256)
    meta = torch.ops.aten._convert_weight_to_int4pack(values_to_nibbles(values).to("meta"), inner)
    packed = pack_int4(values, inner)
    assert (packed.shape, packed.dtype, packed.stride()) == (meta.shape, meta.dtype, meta.stride())


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_each_element_lies_where_the_tensor_core_wants_it(inner: int) -> None:
    """PTX, m16n8k16, B: lane l holds b0, b1 in row 2·(l mod 4) + {0, 1}, b2, b3 8 rows below, of column l / 4.

    A row is k, a column n. Two such tiles fill a word; the first halves of the pairs are in its lower 16 bits.
    """
    n, k = 16, 16 * inner * 2
    values = values_of(n, k)
    packed = pack_int4(values, inner).to(torch.int64) & 0xFFFFFFFF
    seen = torch.zeros(n, k, dtype=torch.bool)
    for tile in range(k // 16):  # 8 × 16 weights
        outer, inside = divmod(tile, inner)
        word, second = divmod(inside, 2)
        for columns in range(n // 8):
            for lane in range(32):
                bits = int(packed[columns, outer, lane, word])
                for register in range(2):
                    pair = (bits >> (4 * (2 * second + register))) & 0x000F000F
                    row, column = 16 * tile + 8 * register + 2 * (lane % 4), 8 * columns + lane // 4
                    assert (pair & 0xFFFF, pair >> 16) == (int(values[column, row]), int(values[column, row + 1]))
                    seen[column, row : row + 2] = True
    assert seen.all()


def test_a_word_by_hand() -> None:
    """Output 0 holds k mod 16: lane 0 has k = 0, 8, 16, 24 in its low half and those behind them in its high half."""
    values = (torch.arange(32) % 16).to(torch.uint8).repeat(8, 1)
    values[1:] = 0
    packed = pack_int4(values, 2)[0, 0, :, 0].to(torch.int64) & 0xFFFFFFFF
    assert [f"{word:08x}" for word in packed[:4].tolist()] == ["91918080", "b3b3a2a2", "d5d5c4c4", "f7f7e6e6"]
    assert not packed[4:].any()


def test_nibbles_have_the_even_value_in_the_high_half() -> None:
    values = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert values_to_nibbles(values).tolist() == [[0x12, 0x34]]
    assert torch.equal(nibbles_to_values(values_to_nibbles(values)), values)


@pytest.mark.parametrize(
    ("values", "inner", "text"),
    [
        (values_of(8, 128), 3, "inner_k_tiles: expected 2, 4 or 8, got 3"),
        (values_of(8, 128).float(), 8, "values: expected integers [n, k], got torch.float32 (8, 128)"),
        (values_of(8, 128)[0], 8, "values: expected integers [n, k], got torch.uint8 (128,)"),
        (values_of(9, 128), 8, "expected n a multiple of 8 and k a multiple of 128 (16 · inner_k_tiles), got 9 × 128"),
        (values_of(8, 96), 4, "k a multiple of 64 (16 · inner_k_tiles), got 8 × 96: pad them"),
        (values_of(8, 128).int() + 1, 8, "values: expected 0 to 15, got 1 to 16"),
        (values_of(8, 128).int() - 1, 8, "values: expected 0 to 15, got -1 to 14"),
    ],
)
def test_packing_refuses(values: torch.Tensor, inner: int, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        pack_int4(values, inner)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "packed", [torch.zeros(1, 1, 32, 4), torch.zeros(1, 32, 4).int(), torch.zeros(1, 1, 16, 4).int()]
)
def test_unpacking_refuses(packed: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match=r"unpack_int4: packed: expected int32 \[n / 8\].*, got torch\."):
        unpack_int4(packed)


def test_unpacking_refuses_other_words() -> None:
    with pytest.raises(InvalidArgumentError, match="inner_k_tiles: expected 2, 4 or 8, got 6"):
        unpack_int4(torch.zeros(1, 1, 32, 3).int())


def test_chunks_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words do not depend on how many rows are packed at a time, nor on the integers' type or strides."""
    values = torch.randint(0, 16, (40, 256), generator=torch.Generator().manual_seed(0))
    expected = pack_int4(values)
    monkeypatch.setattr(chunks, "_CHUNK_MOST", 3 * 8 * 256)
    assert torch.equal(pack_int4(values.to(torch.uint8)), expected)
    assert torch.equal(pack_int4(values.t().contiguous().t()), expected)
    assert pack_int4(values[:0]).shape == (0, 2, 32, 4)
    assert pack_int4(values[:, :0]).shape == (5, 0, 32, 4)
