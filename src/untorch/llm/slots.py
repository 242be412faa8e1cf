"""The rows of a state pool: which sequence holds which.

Recurrent layers keep one state of a sequence, of a fixed size, unlike keys and values: a sequence has one slot for as
long as it runs, and shares it with nobody. A slot's content is worth nothing to the next holder.
"""

from __future__ import annotations

__all__ = ["NO_SLOT", "SlotManager"]

NO_SLOT = -1


class SlotManager:
    """Hands out the slots 0 to count - 1."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"expected at least one slot, got {count}")
        self.count = count
        self._free = list(reversed(range(count)))
        self._held = [False] * count

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A slot. Raises RuntimeError if none is free: the scheduler admits no more sequences than there are slots."""
        if not self._free:
            raise RuntimeError(f"all of {self.count} state slots are held")
        slot = self._free.pop()
        self._held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back; NO_SLOT: nothing."""
        if slot == NO_SLOT:
            return
        if not 0 <= slot < self.count or not self._held[slot]:
            raise ValueError(f"slot {slot} is not held")
        self._held[slot] = False
        self._free.append(slot)
