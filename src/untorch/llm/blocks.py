"""The blocks of a paged KV cache: who holds which, what they contain, and which may be taken next.

A block is free, held by one sequence, or shared by several (a common prefix, the samples of one prompt). A full block
whose content is known stays findable by that content after its last holder let go, until it is taken for something
else: the least recently used first. Contents are chained hashes of tokens, so equal blocks behind different prefixes
differ.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockManager", "BlockTable", "OutOfBlocksError"]

_ROOT = b""
NO_BLOCK = -1


class OutOfBlocksError(Exception):
    """No block is free: a sequence has to give its own back first."""


@dataclass
class BlockTable:
    """The blocks of one sequence, in the order of its positions. Entries behind a window are NO_BLOCK.

    cached: the positions at the beginning whose keys and values came from the prefix cache.
    """

    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    _hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks that are known
    _salt: bytes = b""
    _keys: Mapping[int, bytes] = field(default_factory=dict)
    _dropped: int = 0  # leading entries that are NO_BLOCK
    _row: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    _current: int = 0  # leading entries of _row that are those of blocks

    def row(self) -> NDArray[np.int32]:
        """``blocks`` as an array. It is kept: only what has changed since the last call is converted."""
        count = len(self.blocks)
        if self._current < count:
            if len(self._row) < count:
                self._row = np.empty(max(2 * count, 16), np.int32)
                self._current = 0
            self._row[self._current : count] = self.blocks[self._current :]
        self._current = count
        return self._row[:count]

    def _changed(self, index: int) -> None:
        """Entries from that one on are others."""
        self._current = min(self._current, index)


class BlockManager:
    """Hands out the blocks of a pool.

    count: blocks of the pool. size: positions a block. prefix_cache: whether full blocks are found by their content.
    """

    def __init__(self, count: int, size: int, prefix_cache: bool = True) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"expected at least one block of one position, got {count} of {size}")
        self.count, self.size, self.prefix_cache = count, size, prefix_cache
        self._holders = [0] * count
        self._hash_of: list[bytes | None] = [None] * count
        self._block_of: dict[bytes, int] = {}
        # In the order in which they are taken: the least recently used first. Those without content come first of all.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """Blocks that nobody holds; their contents may still be found."""
        return len(self._free)

    def open(self, tokens: Sequence[int], salt: bytes = b"", keys: Mapping[int, bytes] | None = None) -> BlockTable:
        """A table for a new sequence, with the blocks of its longest known prefix.

        The last token is never taken from the cache: it has to be computed, as its logits are wanted. salt: what else
        the content depends on (an adapter); sequences share blocks only where it is equal. keys: the same of single
        blocks by their number in the table (an image in the place of tokens).
        """
        table = BlockTable(_salt=salt, _keys=keys or {})
        if not self.prefix_cache:
            return table
        for digest in self._digests(table, tokens, max(len(tokens) - 1, 0) // self.size):
            block = self._block_of.get(digest)
            if block is None:
                break
            self._hold(block)
            table.blocks.append(block)
            table._hashes.append(digest)
        table.cached = len(table.blocks) * self.size
        return table

    def needed(self, table: BlockTable, positions: int) -> int:
        """How many blocks ``grow`` would take."""
        return max(0, -(-positions // self.size) - len(table.blocks))

    def grow(self, table: BlockTable, positions: int) -> None:
        """Gives the table room for that many positions. Raises OutOfBlocksError, and then nothing has changed."""
        wanted = self.needed(table, positions)
        if wanted > len(self._free):
            raise OutOfBlocksError(f"{wanted} blocks of {self.size} positions are needed, {len(self._free)} are free")
        for _ in range(wanted):
            table.blocks.append(self._take())

    def commit(self, table: BlockTable, tokens: Sequence[int], count: int | None = None) -> None:
        """The keys and values of the sequence's first ``count`` tokens are in the table's blocks. None: of all."""
        if not self.prefix_cache:
            return
        full = (len(tokens) if count is None else count) // self.size
        for i, digest in enumerate(self._digests(table, tokens, full), start=len(table._hashes)):
            table._hashes.append(digest)
            block = table.blocks[i]
            # An equal block may be known already: both stay, one is found. A block that left a window is not known.
            if block != NO_BLOCK and digest not in self._block_of and self._hash_of[block] is None:
                self._block_of[digest] = block
                self._hash_of[block] = digest

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table with the same blocks: what is written behind needs ``own`` first."""
        for block in table.blocks:
            if block != NO_BLOCK:
                self._hold(block)
        return BlockTable(
            list(table.blocks), table.cached, list(table._hashes), table._salt, table._keys, table._dropped
        )  # fmt: skip

    def own(self, table: BlockTable, position: int) -> tuple[int, int] | None:
        """Makes the block of a position the table's alone. The copy that this needs, from and to, or None.

        Raises OutOfBlocksError, and then nothing has changed.
        """
        index = position // self.size
        block = table.blocks[index]
        if self._holders[block] == 1:
            self._forget(block)  # what is written changes its content
            return None
        if not self._free:
            raise OutOfBlocksError("a shared block has to be copied, and none is free")
        copy = self._take()
        self._release(block)
        table.blocks[index] = copy
        table._changed(index)
        return block, copy

    def drop_before(self, table: BlockTable, position: int) -> None:
        """Gives back the blocks whose positions all lie before ``position``: no window reaches them any more."""
        first, end = table._dropped, min(position // self.size, len(table.blocks))
        if first >= end:
            return
        for i in range(first, end):
            self._release(table.blocks[i])
            table.blocks[i] = NO_BLOCK
        table._dropped = end
        table._changed(first)

    def trim(self, table: BlockTable, positions: int) -> None:
        """Gives back the blocks behind that many positions."""
        for block in table.blocks[-(-positions // self.size) :][::-1]:
            table.blocks.pop()
            if block != NO_BLOCK:
                self._release(block)
        table._changed(len(table.blocks))
        table._dropped = min(table._dropped, len(table.blocks))

    def close(self, table: BlockTable) -> None:
        """Gives back all blocks. The last ones of the sequence are taken first: prefixes are what others share."""
        for block in reversed(table.blocks):
            if block != NO_BLOCK:
                self._release(block)
        table.blocks.clear()
        table._hashes.clear()
        table.cached = table._dropped = 0
        table._changed(0)

    def clear_prefixes(self) -> None:
        """Forgets the contents of all blocks: the weights have changed, say."""
        self._block_of.clear()
        self._hash_of = [None] * self.count

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Raises AssertionError unless these tables hold exactly what is held, and every content is known once."""
        holders = [0] * self.count
        for table in tables:
            for block in table.blocks:
                if block != NO_BLOCK:
                    holders[block] += 1
        assert holders == self._holders, "blocks are held that no table has, or the other way round"
        assert set(self._free) == {i for i, count in enumerate(holders) if count == 0}, "the free blocks are wrong"
        for digest, block in self._block_of.items():
            assert self._hash_of[block] == digest, "a content is found in a block that has another"
        known = [digest for digest in self._hash_of if digest is not None]
        assert len(known) == len(set(known)) == len(self._block_of), "a content is known twice"

    def _digests(self, table: BlockTable, tokens: Sequence[int], full: int) -> list[bytes]:
        """The hashes of the full blocks that the table does not have yet."""
        found: list[bytes] = []
        parent = table._hashes[-1] if table._hashes else _ROOT
        for i in range(len(table._hashes), full):
            part = array("q", tokens[i * self.size : (i + 1) * self.size])
            content = parent + table._salt + table._keys.get(i, b"") + part.tobytes()
            parent = hashlib.blake2b(content, digest_size=16).digest()
            found.append(parent)
        return found

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
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._hash_of[block] = None
