"""The blocks of a paged KV cache: who holds which, what they contain, and which may be taken next.

A block is free, held by one sequence, or shared by several (a common prefix, the samples of one prompt). A full block
whose content is known stays findable by that content after its last holder let go, until it is taken for something
else: the least recently used first. Contents are chained hashes of tokens, so equal blocks behind different prefixes
differ.

Layers that see the same keys are a group, with a block table of its own. All blocks have the same bytes, so a group of
few layers has more positions a block. All groups take their blocks from the same pool. A group with a window gives
blocks back that no query reaches any more, and a known prefix needs only the blocks that the next query sees.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from untorch.llm.block_tables import NO_BLOCK, BlockGroup, BlockTable, GroupTable
from untorch.llm.snapshots import SnapshotCache

__all__ = ["NO_BLOCK", "BlockGroup", "BlockManager", "BlockTable", "GroupTable", "OutOfBlocksError"]

_ROOT = b""


class OutOfBlocksError(Exception):
    """No block is free: a sequence has to give its own back first."""


class BlockManager:
    """Hands out the blocks of a pool.

    count: blocks of the pool. size: positions a block of the group that has the fewest. prefix_cache: whether full
    blocks are found by their content. groups: Their sizes are multiples of ``size``. Default: one, without a window.
    has_windows: whether one of them gives blocks back while a sequence goes on.
    snapshots: of a recurrent model's states; a prefix is known only where there is one.
    """

    def __init__(
        self,
        count: int,
        size: int,
        prefix_cache: bool = True,
        groups: Sequence[BlockGroup] | None = None,
        snapshots: SnapshotCache | None = None,
    ) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"expected at least one block of one position, got {count} of {size}")
        self.count, self.size, self.prefix_cache, self.snapshots = count, size, prefix_cache, snapshots
        self.groups = tuple(groups or (BlockGroup(size),))
        if any(group.size < size or group.size % size for group in self.groups):
            sizes = ", ".join(str(group.size) for group in self.groups)
            raise ValueError(f"expected groups with blocks of a multiple of {size} positions, got {sizes}")
        self._unit = math.lcm(*(group.size for group in self.groups))  # where all groups' blocks end
        self.has_windows = not all(group.sees_all for group in self.groups)
        self._windowed = [i for i, group in enumerate(self.groups) if not group.sees_all]
        self._holders = [0] * count
        self._content_of: list[tuple[int, bytes] | None] = [None] * count  # the group, and the hash
        self._block_of: list[dict[bytes, int]] = [{} for _ in self.groups]
        # In the order in which they are taken: the least recently used first. Those without content come first of all.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def unit(self) -> int:
        """Prefixes are known up to multiples of that many positions: where blocks of all groups end."""
        return self._unit

    @property
    def free(self) -> int:
        """Blocks that nobody holds; their contents may still be found."""
        return len(self._free)

    def open(self, tokens: Sequence[int], salt: bytes = b"", keys: Mapping[int, bytes] | None = None) -> BlockTable:
        """A table for a new sequence, with the blocks of its longest known prefix.

        The last token is never taken from the cache: it has to be computed, as its logits are wanted. salt: what else
        the content depends on (an adapter); sequences share blocks only where it is equal. keys: the same of single
        parts of ``size`` positions by their number (an image in the place of tokens).
        """
        table = BlockTable([GroupTable() for _ in self.groups], salt, keys)
        if not self.prefix_cache:
            return table
        hashes = self._longest_prefix(table, tokens)
        end = len(hashes) * self.size
        if hashes and self.snapshots is not None:
            table.snapshot = self.snapshots.use(hashes[-1])
        for group, own, known in zip(self.groups, table.groups, self._block_of, strict=True):
            own.dropped = min(group.first_seen(end), end) // group.size
            own.blocks = [NO_BLOCK] * own.dropped
            parts = group.size // self.size
            for i in range(own.dropped, end // group.size):
                block = known[hashes[(i + 1) * parts - 1]]
                self._hold(block)
                own.blocks.append(block)
        table._hashes, table.cached = hashes, end
        return table

    def needed(self, table: BlockTable, positions: int) -> int:
        """How many blocks ``grow`` would take."""
        if len(self.groups) == 1:
            return max(0, -(-positions // self.groups[0].size) - len(table.groups[0].blocks))
        count = 0
        for group, own in zip(self.groups, table.groups, strict=True):
            count += max(0, -(-positions // group.size) - len(own.blocks))
        return count

    def to_come(self, table: BlockTable, positions: int, tokens: int) -> int:
        """Blocks more than now that the table holds at most, until it has so many positions.

        tokens: that a step computes of it, at most. What leaves a window is given back meanwhile.
        """
        count = 0
        for group, own in zip(self.groups, table.groups, strict=True):
            needed = -(-positions // group.size) - len(own.blocks)
            if not group.sees_all:
                needed = min(needed, group.most(positions, tokens) - len(own.blocks) + own.dropped)
            count += max(0, needed)
        return count

    def most(self, positions: int, tokens: int) -> int:
        """Blocks that a sequence of that many positions holds at most, computed in steps of up to ``tokens``."""
        return sum(group.most(positions, tokens) for group in self.groups)

    def longest(self, positions: int) -> int:
        """The most positions of a sequence that the pool has room for, up to ``positions``."""
        low, high = 0, positions
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most(middle, 1) <= self.count else (low, middle - 1)
        return low

    def held(self, table: BlockTable) -> int:
        """Blocks of the table, shared or not."""
        return sum(len(own.blocks) - own.dropped for own in table.groups)

    def grow(self, table: BlockTable, positions: int) -> None:
        """Gives the table room for that many positions. Raises OutOfBlocksError, and then nothing has changed."""
        wanted = self.needed(table, positions)
        if wanted == 0:
            return
        if wanted > len(self._free):
            raise OutOfBlocksError(
                f"{wanted} blocks of {self.size} positions are needed, {len(self._free)} are free"
            )  # fmt: skip
        for group, own in zip(self.groups, table.groups, strict=True):
            for _ in range(-(-positions // group.size) - len(own.blocks)):
                own.blocks.append(self._take())

    def commit(self, table: BlockTable, tokens: Sequence[int], count: int | None = None) -> None:
        """The keys and values of the sequence's first ``count`` tokens are in the table's blocks. None: of all."""
        if not self.prefix_cache:
            return
        full, end = (len(tokens) if count is None else count) // self.size, len(table._hashes) * self.size
        for digest in self._digests(table, tokens, full):
            table._hashes.append(digest)
            end += self.size
            for i, (group, own) in enumerate(zip(self.groups, table.groups, strict=True)):
                if end % group.size:
                    continue
                block = own.blocks[end // group.size - 1]
                # An equal block may be known already: both stay, one is found. One that left a window is not known.
                if block != NO_BLOCK and digest not in self._block_of[i] and self._content_of[block] is None:
                    self._block_of[i][digest] = block
                    self._content_of[block] = i, digest

    def snapshot(self, table: BlockTable, position: int, replaces: bool) -> int | None:
        """The row for the state behind that many positions, a multiple of ``unit``, which are committed.

        None: there is no need or no room for it. replaces: as for SnapshotCache.add.
        """
        if self.snapshots is None or not self.prefix_cache:
            return None
        return self.snapshots.add(table._hashes[position // self.size - 1], replaces)

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table with the same blocks: what is written behind needs ``own`` first."""
        for own in table.groups:
            for block in own.blocks[own.dropped :]:
                self._hold(block)
        twin = BlockTable([GroupTable(list(own.blocks), own.dropped) for own in table.groups], table._salt, table._keys)
        twin.cached, twin._hashes = table.cached, list(table._hashes)
        return twin

    def own(self, table: BlockTable, position: int) -> list[tuple[int, int]]:
        """Makes the blocks of a position the table's alone. The copies that this needs, from and to.

        Raises OutOfBlocksError, and then nothing has changed.
        """
        shared: list[tuple[GroupTable, int]] = []
        alone: list[int] = []
        for group, own in zip(self.groups, table.groups, strict=True):
            index = position // group.size
            if index >= len(own.blocks):
                continue
            block = own.blocks[index]
            if self._holders[block] > 1:
                shared.append((own, index))
            else:
                alone.append(block)
        if len(shared) > len(self._free):
            raise OutOfBlocksError(f"{len(shared)} shared blocks have to be copied, {len(self._free)} are free")
        copies = []
        for block in alone:
            self._forget(block)  # what is written changes its content
        for own, index in shared:
            block, copy = own.blocks[index], self._take()
            self._release(block)
            own.blocks[index] = copy
            own.changed(index)
            copies.append((block, copy))
        return copies

    def drop_unseen(self, table: BlockTable, position: int) -> None:
        """Gives back the blocks that no query from ``position`` on sees."""
        for i in self._windowed:
            self.drop_before(table, self.groups[i].first_seen(position), i)

    def drop_before(self, table: BlockTable, position: int, group: int = 0) -> None:
        """Gives back the group's blocks whose positions all lie before ``position``."""
        own = table.groups[group]
        first, end = own.dropped, min(position // self.groups[group].size, len(own.blocks))
        if first >= end:
            return
        for i in range(first, end):
            self._release(own.blocks[i])
            own.blocks[i] = NO_BLOCK
        own.dropped = end
        own.changed(first)

    def trim(self, table: BlockTable, positions: int) -> None:
        """Gives back the blocks behind that many positions."""
        for group, own in zip(self.groups, table.groups, strict=True):
            for block in own.blocks[-(-positions // group.size) :][::-1]:
                own.blocks.pop()
                if block != NO_BLOCK:
                    self._release(block)
            own.changed(len(own.blocks))
            own.dropped = min(own.dropped, len(own.blocks))

    def close(self, table: BlockTable) -> None:
        """Gives back all blocks. The last ones of the sequence are taken first: prefixes are what others share."""
        for own in table.groups:
            for block in reversed(own.blocks[own.dropped :]):
                self._release(block)
            own.blocks.clear()
            own.dropped = 0
            own.changed(0)
        table._hashes.clear()
        table.cached = table.known = 0
        table.snapshot = None

    def clear_prefixes(self) -> None:
        """Forgets the contents of all blocks: the weights have changed, say."""
        for known in self._block_of:
            known.clear()
        self._content_of = [None] * self.count
        if self.snapshots is not None:
            self.snapshots.clear()

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Raises AssertionError unless these tables hold exactly what is held, and every content is known once."""
        holders, group_of = [0] * self.count, dict[int, int]()
        for table in tables:
            for i, own in enumerate(table.groups):
                assert set(own.blocks[: own.dropped]) <= {NO_BLOCK}, "a block that was given back is in a table"
                for block in own.blocks[own.dropped :]:
                    holders[block] += 1
                    assert group_of.setdefault(block, i) == i, "a block is held by two groups"
        assert holders == self._holders, "blocks are held that no table has, or the other way round"
        assert set(self._free) == {i for i, count in enumerate(holders) if count == 0}, "the free blocks are wrong"
        for i, known in enumerate(self._block_of):
            for digest, block in known.items():
                assert self._content_of[block] == (i, digest), "a content is found in a block that has another"
                assert group_of.get(block, i) == i, "a block of one group is found by another"
        contents = [content for content in self._content_of if content is not None]
        assert len(contents) == len(set(contents)) == sum(map(len, self._block_of)), "a content is known twice"
        if self.snapshots is not None:
            held = [self.snapshots._row_of[digest] for digest in self.snapshots._row_of]
            rows = held + self.snapshots._free
            assert len(rows) == len(set(rows)) == self.snapshots.count, "a row of a snapshot is lost, or has two"

    def _longest_prefix(self, table: BlockTable, tokens: Sequence[int]) -> list[bytes]:
        """The hashes of the tokens' longest beginning that is known: in each group, as far as the next query sees.

        Sets ``table.known``.
        """
        last = max(len(tokens) - 1, 0) // self._unit * self._unit
        hashes: list[bytes] = []
        # Of each group with a window: for each block, how many known ones in a row end there.
        runs: dict[int, list[int]] = {i: [] for i in self._windowed}
        end = 0
        for digest in self._digests(table, tokens, last // self.size):
            hashes.append(digest)
            position = len(hashes) * self.size
            for i, group in enumerate(self.groups):
                if position % group.size:
                    continue
                is_known = digest in self._block_of[i]
                if i in runs:
                    runs[i].append((runs[i][-1] if runs[i] else 0) + 1 if is_known else 0)
                elif not is_known:
                    break
            else:
                if position % self._unit == 0:
                    end = position
                continue
            break
        while end > 0:
            if all(self._reaches(self.groups[i], run, end) for i, run in runs.items()):
                table.known = max(table.known, end)
                if self.snapshots is None or hashes[end // self.size - 1] in self.snapshots:
                    break
            end -= self._unit
        return hashes[: end // self.size]

    @staticmethod
    def _reaches(group: BlockGroup, run: list[int], end: int) -> bool:
        """Whether the blocks that a query at ``end`` sees are known, and where a chunk ends, its last one."""
        needed = end // group.size - min(group.first_seen(end), end) // group.size
        return run[end // group.size - 1] >= max(needed, 1)

    def _digests(self, table: BlockTable, tokens: Sequence[int], full: int) -> Iterator[bytes]:
        """The hashes of the full parts of ``size`` tokens that the table does not have yet."""
        parent = table._hashes[-1] if table._hashes else _ROOT
        for i in range(len(table._hashes), full):
            part = array("q", tokens[i * self.size : (i + 1) * self.size])
            content = parent + table._salt + table._keys.get(i, b"") + part.tobytes()
            parent = hashlib.blake2b(content, digest_size=16).digest()
            yield parent

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if self._content_of[block] is None:
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        content = self._content_of[block]
        if content is not None:
            group, digest = content
            del self._block_of[group][digest]
            self._content_of[block] = None
            if self.snapshots is not None:
                self.snapshots.forget(digest)
