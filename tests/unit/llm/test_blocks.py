"""The block manager: no block is lost or shared wrongly, prefixes are found, the least recently used go first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from untorch.llm.blocks import NO_BLOCK, BlockGroup, BlockManager, BlockTable, OutOfBlocksError


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
    shared = table.blocks[1]
    assert manager.own(fork, 5) == [(shared, fork.blocks[1])]
    assert manager.own(fork, 6) == []
    assert fork.blocks[0] == table.blocks[0]
    last = manager.fork(fork)
    manager.grow(table, 9)
    with pytest.raises(OutOfBlocksError, match="1 shared blocks have to be copied, 0 are free"):
        manager.own(last, 5)
    manager.check([table, fork, last])


def test_a_block_that_is_written_again_is_not_found() -> None:
    manager = BlockManager(4, 2)
    table = filled(manager, [1, 2, 3])
    assert manager.own(table, 1) == []
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


GROUPS = [BlockGroup(12), BlockGroup(4, window=7), BlockGroup(8, chunk=10)]


def test_groups_have_tables_of_their_own() -> None:
    manager = BlockManager(40, 4, groups=GROUPS)
    table, tokens = manager.open([]), list(range(30))
    manager.grow(table, 30)
    assert [len(own.blocks) for own in table.groups] == [3, 8, 4] and manager.held(table) == 15
    assert len({block for own in table.groups for block in own.blocks}) == 15
    manager.commit(table, tokens)
    manager.drop_unseen(table, 30)
    # A query at 30 sees positions from 0, 24 and 30 on.
    assert [own.dropped for own in table.groups] == [0, 6, 3] and manager.held(table) == 3 + 2 + 1
    assert [table.row(i).tolist() for i in range(3)] == [own.blocks for own in table.groups]
    manager.check([table])
    fork = manager.fork(table)
    assert fork.groups[1].blocks == table.groups[1].blocks
    copies = manager.own(fork, 30)  # of the groups that have a block there
    assert [source for source, _ in copies] == [own.blocks[-1] for own in table.groups]
    assert len(copies) == 3 and manager.own(fork, 30) == []
    manager.trim(fork, 9)
    assert [len(own.blocks) for own in fork.groups] == [1, 3, 2]
    manager.check([table, fork])
    manager.close(table)
    manager.close(fork)
    assert manager.free == 40


def test_a_prefix_needs_what_the_next_query_sees() -> None:
    manager = BlockManager(40, 4, groups=[BlockGroup(8), BlockGroup(4, window=6)])
    tokens = list(range(33))
    table = manager.open(tokens)
    manager.grow(table, 33)
    manager.commit(table, tokens)
    manager.drop_unseen(table, 33)
    manager.close(table)
    assert manager.free == 40
    again = manager.open(tokens)
    full, window = again.groups
    # 32 positions, which end blocks of both; of the window's those of 27 to 31.
    assert (again.cached, len(full.blocks), window.dropped, len(window.blocks)) == (32, 4, 6, 8)
    manager.check([again])
    manager.close(again)
    # A prefix of eight positions more than the window reaches: at 24 the window's block 5 is the last.
    assert manager.open([*tokens[:26], 99]).cached == 24
    assert manager.open(tokens[:8]).cached == 0
    # Without the window's block before 32, the longest prefix is the next shorter one whose window is known.
    manager._forget(list(manager._block_of[1].values())[7])
    assert manager.open(tokens).cached == 24


def test_a_window_alone() -> None:
    """A prefix of which only the end is known is enough."""
    manager = BlockManager(12, 4, groups=[BlockGroup(4, window=6)])
    tokens = list(range(30))
    table = manager.open(tokens)
    for end in range(4, 29, 4):
        manager.grow(table, end)
        manager.commit(table, tokens, end)
        manager.drop_unseen(table, end)
    manager.close(table)
    other = manager.open([])
    manager.grow(other, 40)  # ten of twelve blocks
    again = manager.open(tokens)
    assert again.cached == 28 and again.blocks[:5] == [NO_BLOCK] * 5 and len(again.blocks) == 7
    manager.check([other, again])


def test_a_chunk_alone() -> None:
    """Behind its end nothing is seen, but a prefix is known by its last block."""
    manager = BlockManager(12, 4, groups=[BlockGroup(4, chunk=8)])
    tokens = list(range(10))
    table = manager.open(tokens)
    assert table.cached == 0
    manager.grow(table, 10)
    manager.commit(table, tokens)
    manager.drop_unseen(table, 10)
    again = manager.open(tokens)
    assert again.cached == 8 and again.blocks == [NO_BLOCK] * 2
    assert manager.open(list(range(50, 60))).cached == 0
    manager.check([table, again])


def test_room_for_groups() -> None:
    manager = BlockManager(20, 4, groups=[BlockGroup(8), BlockGroup(4, window=6)])
    assert (manager.most(100, 1), manager.most(100, 9), manager.most(3, 9)) == (13 + 3, 13 + 5, 2)
    assert manager.longest(1000) == 17 * 8 and manager.longest(50) == 50
    assert BlockManager(2, 4, groups=[BlockGroup(4, window=5)]).longest(1000) == 1000
    assert BlockManager(1, 4, groups=[BlockGroup(4, window=5)]).longest(1000) == 4
    table = manager.open([])
    assert (manager.needed(table, 100), manager.to_come(table, 100, 9)) == (13 + 25, 13 + 5)
    manager.grow(table, 9)
    assert manager.to_come(table, 100, 9) == 11 + 2
    with pytest.raises(OutOfBlocksError, match="40 blocks of 4 positions are needed, 15 are free"):
        manager.grow(table, 120)
    with pytest.raises(ValueError, match="expected groups with blocks of a multiple of 4 positions, got 4, 6"):
        BlockManager(20, 4, groups=[BlockGroup(4), BlockGroup(6)])


@pytest.mark.parametrize(
    ("groups", "steps"),
    [([BlockGroup(4)], 100_000), (GROUPS, 100_000), ([BlockGroup(4, window=9), BlockGroup(8, window=3)], 10_000)],
)
def test_random_operations(groups: list[BlockGroup], steps: int) -> None:
    """10⁵ of them; contents are simulated, so a wrong prefix or a lost copy shows."""
    rng = random.Random(7)
    count = 40 * len(groups)
    manager = BlockManager(count, 4, groups=groups)
    contents: list[list[int | None]] = [[None] * 12 for _ in range(count)]
    live: list[tuple[BlockTable, list[int], int]] = []  # with tokens, and how many of them are computed
    prefix = [rng.randrange(2) for _ in range(48)]
    hits = 0

    def write(table: BlockTable, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            if position % 4 == 0 or position == start:
                for source, target in manager.own(table, position):
                    contents[target] = list(contents[source])
            for group, own in zip(groups, table.groups, strict=True):
                contents[own.blocks[position // group.size]][position % group.size] = tokens[position]

    for step in range(steps):
        choice = rng.random()
        try:
            if choice < 0.25 and len(live) < 12:
                tokens = [*prefix[: rng.randrange(40)], *(rng.randrange(2) for _ in range(rng.randrange(1, 20)))]
                table = manager.open(tokens)
                hits += table.cached > 0
                live.append((table, tokens, table.cached))
            elif choice < 0.65 and live:
                i = rng.randrange(len(live))
                table, tokens, done = live[i]
                if done == len(tokens):
                    tokens.append(rng.randrange(2))
                end = min(len(tokens), done + rng.randrange(1, 12))
                manager.grow(table, end)
                write(table, tokens, done, end)
                if rng.random() < 0.1:  # a draft of which not all is accepted
                    end = rng.randrange(done, end) + 1
                    manager.trim(table, end)
                manager.commit(table, tokens[:end])
                manager.drop_unseen(table, end)
                live[i] = table, tokens, end
            elif choice < 0.75 and live and len(live) < 12:
                table, tokens, done = rng.choice(live)
                live.append((manager.fork(table), list(tokens), done))
            elif choice < 0.8 and live and len(groups) == 1:
                table, _, done = rng.choice(live)
                manager.drop_before(table, rng.randrange(done + 1))
            elif live:
                table, _, _ = live.pop(rng.randrange(len(live)))
                manager.close(table)
        except OutOfBlocksError:
            table, _, _ = live.pop(rng.randrange(len(live)))  # preempted
            manager.close(table)
        if step % (97 if len(groups) == 1 else 397) == 0:
            manager.check([table for table, _, _ in live])
            for table, tokens, done in live:
                for i, (group, own) in enumerate(zip(groups, table.groups, strict=True)):
                    assert table.row(i).tolist() == own.blocks
                    for position in range(done):
                        block = own.blocks[position // group.size]
                        if block == NO_BLOCK:
                            assert position < group.first_seen(done) or len(groups) == 1
                        else:
                            assert contents[block][position % group.size] == tokens[position]
    for table, _, _ in live:
        manager.close(table)
    assert manager.free == count
    assert hits > steps // 20
