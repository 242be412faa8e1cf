"""The block manager: no block is lost or shared wrongly, prefixes are found, the least recently used go first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from untorch.llm.blocks import NO_BLOCK, BlockManager, BlockTable, OutOfBlocksError


def filled(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> BlockTable:
    table = manager.open(tokens, salt)
    manager.grow(table, len(tokens))
    manager.commit(table, tokens)
    return table


def test_a_known_prefix_is_shared() -> None:
    manager = BlockManager(8, 4)
    first = filled(manager, list(range(10)))
    second = manager.open([*range(8), 77, 78])
    assert second.blocks == first.blocks[:2]
    assert second.cached == 8
    other = manager.open([99, *range(1, 10)])
    assert other.blocks == []
    assert manager.open(list(range(10)), salt=b"adapter").blocks == []
    manager.check([first, second, other])


def test_keys_of_single_blocks() -> None:
    manager, tokens = BlockManager(12, 4), list(range(13))
    first = manager.open(tokens, keys={1: b"image"})
    manager.grow(first, 13)
    manager.commit(first, tokens)
    assert manager.open(tokens, keys={1: b"image"}).blocks == first.blocks[:3]
    assert manager.open(tokens, keys={1: b"other"}).blocks == first.blocks[:1]
    assert manager.open(tokens).blocks == first.blocks[:1]
    # A fork that grows on keeps them.
    twin = manager.fork(first)
    manager.grow(twin, 17)
    manager.own(twin, 12)
    manager.commit(twin, [*tokens, 1, 2, 3, 4])
    assert manager.open([*tokens, 1, 2, 3, 4], keys={1: b"image"}).blocks == twin.blocks[:4]


def test_the_last_token_is_computed() -> None:
    manager = BlockManager(8, 4)
    first = filled(manager, list(range(8)))
    assert manager.open(list(range(8))).blocks == first.blocks[:1]


def test_contents_outlive_their_holder_until_taken() -> None:
    manager = BlockManager(4, 2)
    old, new = filled(manager, [1, 2, 3, 4]), filled(manager, [5, 6, 7, 8])
    manager.close(old)
    manager.close(new)
    assert manager.free == 4
    again = manager.open([1, 2, 3, 4, 9])
    assert again.cached == 4
    manager.grow(again, 6)  # the last block of the sequence that was closed last but one is kept, [7, 8] is taken
    assert manager.open([5, 6, 7, 8, 9]).cached == 2


def test_blocks_behind_a_position_are_given_back() -> None:
    manager = BlockManager(8, 4)
    table = filled(manager, list(range(6)))
    manager.grow(table, 17)
    kept = table.blocks[:2]
    manager.trim(table, 8)
    assert table.blocks == kept and manager.free == 6
    manager.trim(table, 20)
    assert table.blocks == kept
    manager.check([table])
    manager.grow(table, 9)
    manager.drop_before(table, 8)
    manager.trim(table, 4)
    assert table.blocks == [NO_BLOCK] and manager.free == 8
    manager.check([table])


def test_without_a_prefix_cache() -> None:
    manager = BlockManager(4, 2, prefix_cache=False)
    filled(manager, [1, 2, 3, 4])
    assert manager.open([1, 2, 3, 4, 5]).blocks == []


def test_out_of_blocks_changes_nothing() -> None:
    manager = BlockManager(3, 2)
    table = filled(manager, [1, 2, 3, 4])
    other = manager.open([9])
    with pytest.raises(OutOfBlocksError, match="2 blocks of 2 positions are needed, 1 are free"):
        manager.grow(other, 4)
    assert other.blocks == []
    manager.check([table, other])


def test_copy_on_write() -> None:
    manager = BlockManager(4, 4)
    table = filled(manager, [1, 2, 3, 4, 5])
    fork = manager.fork(table)
    assert manager.own(fork, 5) == (table.blocks[1], fork.blocks[1])
    assert manager.own(fork, 6) is None
    assert fork.blocks[0] == table.blocks[0]
    last = manager.fork(fork)
    manager.grow(table, 9)
    with pytest.raises(OutOfBlocksError, match="none is free"):
        manager.own(last, 5)
    manager.check([table, fork, last])


def test_a_block_that_is_written_again_is_not_found() -> None:
    manager = BlockManager(4, 2)
    table = filled(manager, [1, 2, 3])
    assert manager.own(table, 1) is None
    assert manager.open([1, 2, 3]).blocks == []


def test_a_window_gives_blocks_back() -> None:
    manager = BlockManager(6, 2)
    table = filled(manager, list(range(9)))
    manager.drop_before(table, 5)
    assert table.blocks[:2] == [NO_BLOCK, NO_BLOCK]
    assert manager.free == 3
    manager.drop_before(table, 5)
    manager.commit(table, list(range(10)))
    manager.check([table])
    manager.close(table)
    assert manager.free == 6


def test_forgotten_prefixes() -> None:
    manager = BlockManager(4, 2)
    table = filled(manager, [1, 2, 3])
    manager.clear_prefixes()
    assert manager.open([1, 2, 3]).blocks == []
    manager.check([table])


def test_the_table_as_an_array() -> None:
    manager = BlockManager(40, 2)
    table = filled(manager, [1, 2, 3])
    assert table.row().dtype == np.int32 and table.row().tolist() == table.blocks
    manager.grow(table, 70)  # more than there was room for
    assert table.row().tolist() == table.blocks and len(table.blocks) == 35
    fork = manager.fork(table)
    assert fork.row().tolist() == table.blocks
    manager.own(fork, 3)
    assert fork.row().tolist() == fork.blocks != table.blocks
    manager.drop_before(fork, 8)
    assert fork.row().tolist() == fork.blocks and fork.blocks[:4] == [NO_BLOCK] * 4
    manager.trim(fork, 20)
    manager.grow(fork, 24)
    assert fork.row().tolist() == fork.blocks and len(fork.blocks) == 12
    manager.close(table)
    assert table.row().tolist() == []


@pytest.mark.parametrize(("count", "size"), [(0, 4), (4, 0)])
def test_no_blocks(count: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected at least one block of one position"):
        BlockManager(count, size)


def test_random_operations() -> None:
    """10⁵ of them; contents are simulated, so a wrong prefix or a lost copy shows."""
    rng = random.Random(7)
    manager = BlockManager(40, 4)
    contents: list[list[int | None]] = [[None] * 4 for _ in range(40)]
    live: list[tuple[BlockTable, list[int], int]] = []  # with tokens, and how many of them are computed

    def write(table: BlockTable, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            if position % 4 == 0 or position == start:
                copied = manager.own(table, position)
                if copied is not None:
                    contents[copied[1]] = list(contents[copied[0]])
            contents[table.blocks[position // 4]][position % 4] = tokens[position]

    for step in range(100_000):
        choice = rng.random()
        try:
            if choice < 0.25 and len(live) < 12:
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
                table = manager.open(tokens)
                live.append((table, tokens, table.cached))
            elif choice < 0.65 and live:
                i = rng.randrange(len(live))
                table, tokens, done = live[i]
                if done == len(tokens):
                    tokens.append(rng.randrange(2))
                end = min(len(tokens), done + rng.randrange(1, 12))
                manager.grow(table, end)
                write(table, tokens, done, end)
                manager.commit(table, tokens[:end])
                live[i] = table, tokens, end
            elif choice < 0.75 and live and len(live) < 12:
                table, tokens, done = rng.choice(live)
                live.append((manager.fork(table), list(tokens), done))
            elif choice < 0.8 and live:
                table, _, done = rng.choice(live)
                manager.drop_before(table, rng.randrange(done + 1))
            elif live:
                table, _, _ = live.pop(rng.randrange(len(live)))
                manager.close(table)
        except OutOfBlocksError:
            table, _, _ = live.pop(rng.randrange(len(live)))  # preempted
            manager.close(table)
        if step % 97 == 0:
            manager.check([table for table, _, _ in live])
            for table, tokens, done in live:
                assert table.row().tolist() == table.blocks
                for position in range(done):
                    block = table.blocks[position // 4]
                    assert block == NO_BLOCK or contents[block][position % 4] == tokens[position]
    for table, _, _ in live:
        manager.close(table)
    assert manager.free == 40
