"""Rows for snapshots of states: found by their prefix, the least recently used go first."""

from __future__ import annotations

from untorch.llm.snapshots import SnapshotCache


def test_the_least_recently_used_gives_way() -> None:
    cache = SnapshotCache(range(8, 10))
    assert (cache.count, len(cache)) == (2, 0)
    assert (cache.add(b"a"), cache.add(b"b"), cache.add(b"a")) == (8, 9, None)
    assert cache.add(b"c", replaces=False) is None and b"c" not in cache
    assert cache.add(b"c") == 9 and b"b" not in cache
    assert cache.use(b"a") == 8
    assert cache.add(b"d") == 9 and b"a" in cache and len(cache) == 2


def test_forgotten_ones() -> None:
    cache = SnapshotCache([4])
    assert cache.add(b"a") == 4
    cache.forget(b"b")
    cache.forget(b"a")
    assert len(cache) == 0 and cache.add(b"b", replaces=False) == 4
    cache.clear()
    assert b"b" not in cache and cache.add(b"c", replaces=False) == 4


def test_no_rows() -> None:
    assert SnapshotCache([]).add(b"a") is None
