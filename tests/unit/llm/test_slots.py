"""Slots of a state pool: none is lost, and none is held twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untorch.llm.slots import NO_SLOT, SlotManager


@given(count=st.integers(1, 6), choices=st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=60))
def test_random_operations(count: int, choices: list[int | None]) -> None:
    """None: take; a number: release one of those that are held."""
    manager = SlotManager(count)
    held: list[int] = []
    for choice in choices:
        if choice is None and len(held) == count:
            with pytest.raises(RuntimeError, match=f"all of {count} state slots are held"):
                manager.take()
        elif choice is None:
            held.append(manager.take())
        elif held:
            manager.release(held.pop(choice % len(held)))
        assert len(set(held)) == len(held) == count - manager.free
        assert all(0 <= slot < count for slot in held)


def test_what_is_not_held() -> None:
    manager = SlotManager(2)
    manager.release(NO_SLOT)
    slot = manager.take()
    manager.release(slot)
    for wrong in (slot, 2, -2):
        with pytest.raises(ValueError, match=f"slot {wrong} is not held"):
            manager.release(wrong)
    assert manager.free == 2


def test_no_slots() -> None:
    with pytest.raises(ValueError, match="expected at least one slot, got 0"):
        SlotManager(0)
