"""Block tables: the blocks of a sequence in each group of layers that see the same keys, and what a group sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_BLOCK", "BlockGroup", "BlockTable", "GroupTable"]

NO_BLOCK = -1


@dataclass(frozen=True)
class BlockGroup:
    """Layers whose queries see the same keys. size: positions a block.

    window: the positions that a query sees, its own among them; chunk: queries see those of their own chunk. 0: all.
    """

    size: int
    window: int = 0
    chunk: int = 0

    @property
    def sees_all(self) -> bool:
        """Whether queries see all positions before them."""
        return not self.window and not self.chunk

    def first_seen(self, position: int) -> int:
        """The first position that a query at ``position`` sees. No later query sees an earlier one."""
        first = position + 1 - self.window if self.window else 0
        return max(first, position // self.chunk * self.chunk if self.chunk else 0)

    def most(self, positions: int, tokens: int) -> int:
        """Blocks that a sequence of that many positions holds at most, computed in steps of up to ``tokens``."""
        needed = -(-positions // self.size)
        if self.sees_all:
            return needed
        before = min(reach - 1 for reach in (self.window, self.chunk) if reach)
        return min(needed, (before + tokens + self.size - 2) // self.size + 1)


class GroupTable:
    """The blocks of one sequence in one group, in the order of its positions. The first ``dropped`` are NO_BLOCK."""

    __slots__ = ("_current", "_row", "blocks", "dropped")

    def __init__(self, blocks: list[int] | None = None, dropped: int = 0) -> None:
        self.blocks: list[int] = [] if blocks is None else blocks
        self.dropped = dropped
        self._row: NDArray[np.int32] = np.empty(0, np.int32)
        self._current = 0  # leading entries of _row that are those of blocks

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

    def changed(self, index: int) -> None:
        """Entries from that one on are others."""
        self._current = min(self._current, index)


class BlockTable:
    """The blocks of one sequence, by group.

    cached: the positions at the beginning whose keys and values came from the prefix cache. known: those that it has
    keys and values of; more than ``cached`` where a recurrent model has no state behind them. snapshot: the row of the
    state behind those that are cached.
    """

    __slots__ = ("_hashes", "_keys", "_salt", "cached", "groups", "known", "snapshot")

    def __init__(
        self, groups: list[GroupTable], salt: bytes = b"", keys: Mapping[int, bytes] | None = None
    ) -> None:  # fmt: skip
        self.groups, self._salt, self._keys = groups, salt, keys or {}
        self.cached = self.known = 0
        self.snapshot: int | None = None
        self._hashes: list[bytes] = []  # of the leading positions that are known, one for each ``BlockManager.size``

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.groups[0].blocks

    def row(self, group: int = 0) -> NDArray[np.int32]:
        """A group's blocks as an array."""
        return self.groups[group].row()
