"""Which sequences get how many tokens of the next step, and which blocks their keys and values go to.

Sequences that decode come first, one token each; what is left of the step's token budget goes to prompts, which are
cut into chunks. When no block is free, the sequence of the lowest rank gives its own back and is computed again later;
the prefix cache makes that cheap. So do sequences of a lower priority for one that waits. With a state pool, a sequence
has a slot of it while it runs. Sequences that speculate get tokens to verify behind their own, in blocks that nobody
else needs now. Knows no model.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from untorch.llm.blocks import BlockManager, BlockTable, OutOfBlocksError
from untorch.llm.sequence import Sequence
from untorch.llm.slots import NO_SLOT, SlotManager

__all__ = ["Plan", "Scheduled", "Scheduler"]


@dataclass(slots=True)
class Scheduled:
    """``count`` tokens of a sequence from ``start`` on. drafted: the last ones that are of its draft."""

    sequence: Sequence
    start: int
    count: int
    drafted: int = 0

    @property
    def end(self) -> int:
        """The positions that are computed afterwards."""
        return self.start + self.count


@dataclass
class Plan:
    """A step. copies: of whole blocks, from and to, in this order and before the step; state_copies: of slots.

    full: sequences that no room is left for even if they were alone; the scheduler has dropped them. behind: the step
    that this one has the tokens of. drafted: tokens of drafts, among ``tokens``. changes: the scheduler's count of
    sequences that began or ceased to run, when the plan was made.
    """

    items: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    full: list[Sequence] = field(default_factory=list)
    tokens: int = 0
    behind: Plan | None = None
    drafted: int = 0
    changes: int = 0

    def add(self, item: Scheduled) -> None:
        """Into the step."""
        self.items.append(item)
        self.tokens += item.count

    def drop_draft(self, item: Scheduled) -> None:
        """An item goes on without its draft."""
        item.sequence.draft = []
        item.count -= item.drafted
        self.tokens -= item.drafted
        self.drafted -= item.drafted
        item.drafted = 0

    def drop(self, sequence: Sequence) -> None:
        """Out of the step, if it is there."""
        self.items = [item for item in self.items if item.sequence is not sequence]
        self.tokens = sum(item.count for item in self.items)


class Scheduler:
    """max_batch_tokens: of a step. max_sequences: that hold blocks at a time.

    slots: of the state pool, max_sequences or more; None: the model keeps no states. With slots the blocks' prefix
    cache needs snapshots, as a known prefix has no state: prompts are cut where one is taken.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_batch_tokens: int,
        max_sequences: int,
        slots: SlotManager | None = None,
    ) -> None:
        lacks_states = blocks.prefix_cache and blocks.snapshots is None
        if slots is not None and (lacks_states or slots.count < max_sequences):
            raise ValueError(
                "expected a slot for each of max_sequences, and no prefix cache beside them without snapshots"
            )
        self.blocks, self.slots = blocks, slots
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self.waiting: list[Sequence] = []  # both by rank
        self.running: list[Sequence] = []
        self.preemptions = self.prefix_hits = 0
        self._refused: Sequence | None = None
        self._refused_at = 0
        self._state_copies: list[tuple[int, int]] = []
        self._budget = max_batch_tokens
        self._changes = 0  # of ``running``

    @property
    def has_work(self) -> bool:
        """Whether any sequence is here."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        bisect.insort(self.waiting, sequence, key=lambda other: other.rank)

    def remove(self, sequence: Sequence) -> None:
        """It is finished, cancelled or failed: its blocks are free. No error if it is not here."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._changes += 1
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._close(sequence)

    def fork(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """The others go on from the same prompt, whose blocks they share; states are copied before the next step."""
        assert sequence.table is not None
        sequence.samples = 1
        for other in others:
            other.table, other.computed, other.cached = (
                self.blocks.fork(sequence.table), sequence.computed, sequence.cached,
            )  # fmt: skip
            other.draft_computed = sequence.draft_computed
            if self.slots is not None:
                other.slot = self.slots.take()
                self._state_copies.append((sequence.slot, other.slot))
            bisect.insort(self.running, other, key=lambda one: one.rank)
        self._changes += 1

    def schedule(self) -> Plan:
        """The next step; without items if nothing can run."""
        plan, before = Plan(), self.preemptions
        plan.state_copies, self._state_copies = self._state_copies, []
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        wanted = 0
        for sequence in self.running:
            remaining = len(sequence.tokens) - sequence.computed
            if remaining == 1:
                decoding.append(sequence)
                wanted += sequence.wanted
            elif remaining > 1:
                prompts.append(sequence)
        self._budget = self.max_batch_tokens
        if wanted:
            self._budget -= self._room_for_drafts(wanted, len(decoding), bool(prompts or self.waiting))
        for sequence in (*decoding, *prompts):
            if sequence.table is not None:  # it may have been preempted for an earlier one
                self._place(plan, sequence)
        if self.preemptions == before:
            while self.waiting and plan.tokens < self._budget and self._admit(plan):
                pass
        if wanted:
            self._add_drafts(plan)
        plan.changes = self._changes
        if not plan.items:  # no step: they are for the next one
            plan.state_copies, self._state_copies = [], plan.state_copies
        return plan

    def follow(self, plan: Plan) -> Plan | None:
        """The step behind ``plan``, whose tokens are those that ``plan`` gives and that are not known yet.

        It takes the items of ``plan``, which is complete, and moves them on. None unless it has the same sequences: one
        has left, another one is to come, or a block is missing.
        """
        items, blocks = plan.items, self.blocks
        if plan.changes != self._changes or len(items) != len(self.running) or (self.waiting and not self._is_full):
            return None
        if self._state_copies:
            return None
        full = [item for item in items if (item.start + item.count) % blocks.size == 0]
        tables = [(item.sequence.table, item.end + 1) for item in full if item.sequence.table is not None]
        if sum([blocks.needed(table, end) for table, end in tables]) > blocks.free:
            return None
        for table, end in tables:
            blocks.grow(table, end)
        for item in items:
            item.start += item.count
            item.count = 1
        plan.behind = None
        return Plan(items, tokens=len(items), behind=plan, changes=plan.changes)

    @property
    def _is_full(self) -> bool:
        """Whether the first of the waiting sequences is known not to fit."""
        first = self.waiting[0]
        if self.running and self.running[-1].priority > first.priority:
            return False
        if sum(other.samples for other in self.running) + first.samples > self.max_sequences:
            return True
        return self._refused is first

    def complete(self, plan: Plan) -> None:
        """The step has run: what it computed may be shared, and what no window reaches is given back."""
        size, has_windows, drafted = self.blocks.size, self.blocks.has_windows, plan.drafted
        has_snapshots = self.blocks.snapshots is not None
        for item in plan.items:
            sequence, start = item.sequence, item.start
            if sequence.table is None:
                continue
            sequence.computed = end = start + item.count - item.drafted if drafted else start + item.count
            if has_windows or end // size > start // size:
                self._share(sequence, sequence.table, start)
            if has_snapshots and end < len(sequence.tokens):
                self._save(sequence, sequence.table)

    def settle(self, sequence: Sequence) -> None:
        """Of a draft that was computed, what was accepted is among the tokens now, and the last token is a new one.

        Keys and values of accepted tokens may be shared. Those of rejected ones are overwritten by the next step, and
        blocks that have no others are given back.
        """
        sequence.wanted, sequence.draft = 0, []
        table, begin, end = sequence.table, sequence.computed, len(sequence.tokens) - 1
        if table is None:
            return
        sequence.computed = end
        self._share(sequence, table, begin)
        self.blocks.trim(table, len(sequence.tokens))

    def _share(self, sequence: Sequence, table: BlockTable, begin: int) -> None:
        """Full blocks from ``begin`` on can be found, and those that no window reaches any more are given back."""
        end, size = sequence.computed, self.blocks.size
        if end // size > begin // size:
            self.blocks.commit(table, sequence.tokens, end)
        if self.blocks.has_windows:
            self.blocks.drop_unseen(table, end)

    def _save(self, sequence: Sequence, table: BlockTable) -> None:
        """Takes a snapshot of the state of a prompt whose step ended where one may be of use."""
        end, blocks = sequence.computed, self.blocks
        if end % blocks.unit == 0:
            row = blocks.snapshot(table, end, end in sequence.borders)
            if row is not None:
                self._state_copies.append((sequence.slot, row))

    def forget_states(self) -> None:
        """A step failed, and with it the copies of states that it should have made."""
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.clear()

    def _room_for_drafts(self, wanted: int, decoding: int, prompts: bool) -> int:
        """Tokens of the step that are kept for drafts: where prompts are to be computed, they get half at least."""
        spare = self.max_batch_tokens - decoding
        return max(0, min(wanted, spare // 2 if prompts else spare))

    def _add_drafts(self, plan: Plan) -> None:
        """Where tokens and free blocks are left. Nothing is preempted for a draft."""
        left, blocks = self.max_batch_tokens - plan.tokens, self.blocks
        for item in plan.items:
            sequence, table = item.sequence, item.sequence.table
            if not sequence.wanted or table is None:
                continue
            count = max(0, min(sequence.wanted, left))
            while count and blocks.needed(table, item.end + count) > blocks.free:
                count -= 1
            blocks.grow(table, item.end + count)
            del sequence.draft[count:]
            item.count += count
            item.drafted = count
            plan.tokens += count
            plan.drafted += count
            left -= count

    def _place(self, plan: Plan, sequence: Sequence) -> None:
        blocks, start = self.blocks, sequence.computed
        count = min(len(sequence.tokens) - start, self._budget - plan.tokens)
        if blocks.snapshots is not None:
            count = self._to_border(sequence, start, count)
        while count > 0 and sequence.table is not None:
            try:
                # A block that is shared is copied before it is written to.
                plan.copies += blocks.own(sequence.table, start)
                blocks.grow(sequence.table, start + count)
            except OutOfBlocksError:
                fitting = self._fitting(sequence.table, start, count) if len(self.running) == 1 else 0
                if 0 < fitting < count:
                    count = fitting
                else:
                    self._make_room(plan, sequence)
                continue
            plan.add(Scheduled(sequence, start, count))
            return

    def _to_border(self, sequence: Sequence, start: int, count: int) -> int:
        """Of a prompt's next tokens, those up to a place where its state is of use to others."""
        end = next((border for border in sequence.borders if start < border < start + count), None)
        if end is None:
            end = start + count
            if end < len(sequence.tokens):  # the budget cuts it
                end = max(end // self.blocks.unit * self.blocks.unit, 0)
        return end - start if end > start else count

    def _fitting(self, table: BlockTable, start: int, count: int) -> int:
        """How many of the tokens there are blocks for, where windows give blocks back behind each step; else 0."""
        if not self.blocks.has_windows:
            return 0
        while count > 0 and self.blocks.needed(table, start + count) > self.blocks.free:
            count = (start + count - 1) // self.blocks.size * self.blocks.size - start
        return max(count, 0)

    def _make_room(self, plan: Plan, sequence: Sequence) -> None:
        victim = self.running[-1]
        if victim is sequence and len(self.running) == 1:
            self.remove(sequence)
            plan.full.append(sequence)
            return
        self._preempt(plan, victim)

    def _displace(self, plan: Plan, sequence: Sequence) -> bool:
        """Preempts the last of the running sequences for one of a higher priority, if enough of them are lower."""
        lower = [other for other in self.running if other.priority > sequence.priority]
        if sum(other.samples for other in self.running if other not in lower) + sequence.samples > self.max_sequences:
            return False
        blocks = sum(self.blocks.held(other.table) for other in lower if other.table is not None)
        needed = self.blocks.most(len(sequence.tokens), self.max_batch_tokens)
        if not lower or needed > self.blocks.free + blocks:
            return False
        self._preempt(plan, self.running[-1])
        return True

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        plan.drop(victim)
        self.running.remove(victim)
        self._changes += 1
        self._close(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)

    def _admit(self, plan: Plan) -> bool:
        """Takes the first of the waiting sequences into the step, if there is room for all of its tokens."""
        sequence = self.waiting[0]
        held = sum(other.samples for other in self.running)
        if held and held + sequence.samples > self.max_sequences:
            return self._displace(plan, sequence)
        blocks, most = self.blocks, self.max_batch_tokens
        if blocks.most(len(sequence.tokens), 1) > blocks.count:
            self.waiting.pop(0)
            plan.full.append(sequence)
            return True
        # Sequences that are not computed yet get what they need first.
        promised = sum(
            blocks.to_come(other.table, len(other.tokens), most) for other in self.running if other.table is not None
        )
        left = blocks.free - promised
        if self.running and self._refused is sequence and left <= self._refused_at:
            # Its prefix is not looked for again before there is more room.
            return self._displace(plan, sequence)
        keys = None if sequence.embeddings is None else sequence.embeddings.keys
        table = blocks.open(sequence.tokens if sequence.shares_prefix else [], sequence.salt, keys)
        # One that was preempted comes back when there is a block more for each of the others, or it would go again.
        spare = len(self.running) if sequence.preemptions else 0
        if self.running and blocks.to_come(table, len(sequence.tokens), most) + promised + spare > blocks.free:
            blocks.close(table)
            self._refused, self._refused_at = sequence, left
            return self._displace(plan, sequence)
        self.waiting.pop(0)
        self._refused = None
        sequence.table, sequence.computed, sequence.draft_computed = table, table.cached, table.cached
        if self.slots is not None:
            sequence.slot = self.slots.take()
            if table.snapshot is not None:
                plan.state_copies.append((table.snapshot, sequence.slot))
            # Another prompt began as this one does up to ``known``; the next one may be this one and more.
            last = (len(sequence.tokens) - 1) // blocks.unit * blocks.unit
            sequence.borders = tuple(sorted({end for end in (table.known, last) if end > table.cached}))
        if not sequence.preemptions:
            sequence.cached = table.cached
            self.prefix_hits += table.cached > 0
        bisect.insort(self.running, sequence, key=lambda other: other.rank)
        self._changes += 1
        before = len(plan.items)
        self._place(plan, sequence)
        return len(plan.items) > before or sequence in plan.full

    def _close(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.blocks.close(sequence.table)
        if self.slots is not None:
            self.slots.release(sequence.slot)
        sequence.table, sequence.computed, sequence.slot, sequence.borders = None, 0, NO_SLOT, ()
        sequence.wanted, sequence.draft, sequence.draft_computed = 0, [], 0
