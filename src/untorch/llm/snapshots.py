"""Snapshots of recurrent states: which row of the state pool holds the state behind which known prefix.

Known pages alone are of no use to a recurrent layer: it needs the state behind the prefix's last token. So states are
copied to rows of their own where prompts are likely to go apart, and back when a prompt begins as one before. A
snapshot is found by the hash that the prefix cache has for its place. The least recently used ones give way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["SnapshotCache"]


class SnapshotCache:
    """rows: of the state pool, beside the slots of sequences that run."""

    def __init__(self, rows: Iterable[int]) -> None:
        self._free = list(rows)[::-1]
        self.count = len(self._free)
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        """Snapshots that are held."""
        return len(self._row_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._row_of

    def use(self, digest: bytes) -> int:
        """The row of a snapshot that is held."""
        self._row_of.move_to_end(digest)
        return self._row_of[digest]

    def add(self, digest: bytes, replaces: bool = True) -> int | None:
        """The row that a state is to be copied to; None: it is held already, or there is no row for it.

        replaces: whether the least recently used one gives way if no row is free.
        """
        if digest in self._row_of:
            self._row_of.move_to_end(digest)
            return None
        if self._free:
            row = self._free.pop()
        elif replaces and self._row_of:
            _, row = self._row_of.popitem(last=False)
        else:
            return None
        self._row_of[digest] = row
        return row

    def forget(self, digest: bytes) -> None:
        """Its prefix is not known any more. No error if there is none."""
        row = self._row_of.pop(digest, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        """Forgets all."""
        self._free += self._row_of.values()
        self._row_of.clear()
