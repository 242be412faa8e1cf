"""The scheduler without a model: budgets, order, preemption, sharing."""

from __future__ import annotations

import random

import pytest

from untorch.llm.blocks import BlockGroup, BlockManager
from untorch.llm.scheduler import Plan, Scheduler
from untorch.llm.sequence import Sequence
from untorch.llm.slots import NO_SLOT, SlotManager
from untorch.llm.snapshots import SnapshotCache


def sequence(length: int, order: int = 0, start: int = 0, **fields: int) -> Sequence:
    return Sequence(list(range(start, start + length)), order=(order, 0), **fields)


def make(
    blocks: int = 16,
    size: int = 4,
    tokens: int = 8,
    sequences: int = 8,
    window: int = 0,
    slots: SlotManager | None = None,
    groups: list[BlockGroup] | None = None,
    snapshots: int = 0,
) -> Scheduler:
    states = SnapshotCache(range(slots.count, slots.count + snapshots)) if slots is not None and snapshots else None
    has_prefixes = slots is None or snapshots > 0
    manager = BlockManager(blocks, size, has_prefixes, groups or [BlockGroup(size, window)], states)
    return Scheduler(manager, tokens, sequences, slots)


def step(scheduler: Scheduler, states: States | None = None) -> tuple[Plan, list[tuple[int, int, int]]]:
    """A step after which sequences that are computed get one token. What ran: arrival, start, count."""
    plan = scheduler.schedule()
    if states is not None:
        states.run(plan)
    scheduler.complete(plan)
    for item in plan.items:
        if item.sequence.remaining == 0:
            item.sequence.tokens.append(1000 + len(item.sequence.tokens))
    return plan, [(item.sequence.order[0], item.start, item.count) for item in plan.items]


def test_prompts_are_cut_and_decoding_comes_first() -> None:
    scheduler = make()
    scheduler.add(sequence(3, 1))
    assert step(scheduler)[1] == [(1, 0, 3)]
    scheduler.add(sequence(20, 2, 100))
    assert step(scheduler)[1] == [(1, 3, 1), (2, 0, 7)]
    assert step(scheduler)[1] == [(1, 4, 1), (2, 7, 7)]
    scheduler.add(sequence(2, 3, 200))
    assert step(scheduler)[1] == [(1, 5, 1), (2, 14, 6), (3, 0, 1)]
    assert step(scheduler)[1] == [(1, 6, 1), (2, 20, 1), (3, 1, 1)]


def test_smaller_priorities_come_first() -> None:
    scheduler = make(tokens=4)
    scheduler.add(sequence(4, 1))
    scheduler.add(sequence(4, 2, 50, priority=-1))
    assert step(scheduler)[1] == [(2, 0, 4)]
    assert step(scheduler)[1] == [(2, 4, 1), (1, 0, 3)]


def test_lower_priorities_give_way() -> None:
    scheduler = make(tokens=16, sequences=2)
    scheduler.add(sequence(4, 1, 50, priority=1))
    scheduler.add(sequence(4, 2, 100, priority=2))
    assert step(scheduler)[1] == [(1, 0, 4), (2, 0, 4)]
    # All places are taken: the one of the lowest priority is computed again later.
    scheduler.add(sequence(3, 3, priority=1))
    assert step(scheduler)[1] == [(1, 4, 1), (3, 0, 3)] and scheduler.preemptions == 1
    # An equal priority waits, and so does a lower one.
    scheduler.add(sequence(3, 4, 200, priority=1))
    assert [ran for ran, *_ in step(scheduler)[1]] == [1, 3]
    # What cannot run in all the places of lower ones displaces nobody.
    scheduler.add(sequence(3, 5, 300, samples=3))
    assert [ran for ran, *_ in step(scheduler)[1]] == [1, 3] and scheduler.preemptions == 1


def test_blocks_of_lower_priorities() -> None:
    scheduler = make(blocks=4, tokens=16)
    low = sequence(10, 1, 50, priority=5)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(sequence(9, 2))
    assert step(scheduler)[1] == [(2, 0, 9)] and low.table is None
    # A step is not enqueued ahead of one that gives way.
    scheduler.add(sequence(1, 3, 200))
    plan = scheduler.schedule()
    assert [item.sequence.order[0] for item in plan.items] == [2, 3] and scheduler.follow(plan) is not None
    scheduler.add(sequence(3, 4, 300, priority=-1))
    assert scheduler.follow(plan) is None


def test_steps_that_follow_each_other() -> None:
    scheduler = make(blocks=5, tokens=16)
    one, two = sequence(3, 1), sequence(2, 2, 50)
    scheduler.add(one)
    scheduler.add(two)
    plan: Plan | None = scheduler.schedule()
    places = []
    while plan is not None:
        places.append([(item.start, item.count) for item in plan.items])
        scheduler.complete(plan)
        for item in plan.items:
            item.sequence.tokens.append(1)
        last, plan = plan, scheduler.follow(plan)
        assert plan is None or (plan.behind is last and last.behind is None and plan.tokens == 2)
    # Until the second one needs a third block, as the first one has the last of five.
    assert places == [[(0, 3), (0, 2)]] + [[(3 + i, 1), (2 + i, 1)] for i in range(6)]
    assert (one.computed, two.computed) == (9, 8)
    scheduler.blocks.check([one.table, two.table])  # type: ignore[list-item]


def test_nothing_follows_a_step_whose_sequences_are_others() -> None:
    scheduler = make(tokens=16)
    scheduler.add(sequence(3, 1))
    plan, _ = step(scheduler)
    scheduler.remove(plan.items[0].sequence)
    scheduler.add(sequence(3, 2, 50))
    other, _ = step(scheduler)
    assert scheduler.follow(plan) is None  # as many run as before
    assert scheduler.follow(other) is not None


def test_max_sequences_count_samples() -> None:
    scheduler = make(tokens=64, sequences=3)
    scheduler.add(sequence(2, 1, samples=2))
    scheduler.add(sequence(2, 2, 20, samples=2))
    scheduler.add(sequence(2, 3, 40))
    assert step(scheduler)[1] == [(1, 0, 2)]


def test_a_known_prefix_is_not_computed() -> None:
    scheduler = make(tokens=64)
    first = sequence(10, 1)
    scheduler.add(first)
    step(scheduler)
    again = sequence(12, 2)
    scheduler.add(again)
    assert step(scheduler)[1] == [(1, 10, 1), (2, 8, 4)]
    assert again.cached == 8
    apart = sequence(12, 3)
    apart.shares_prefix = False
    scheduler.add(apart)
    assert (3, 0, 12) in step(scheduler)[1]


def test_preemption_takes_the_last_and_computes_it_again() -> None:
    scheduler = make(blocks=4, tokens=64)
    first, last = sequence(7, 1), sequence(7, 2, 50)
    scheduler.add(first)
    scheduler.add(last)
    assert step(scheduler)[1] == [(1, 0, 7), (2, 0, 7)]
    assert step(scheduler)[1] == [(1, 7, 1), (2, 7, 1)]
    assert step(scheduler)[1] == [(1, 8, 1)]
    assert scheduler.preemptions == last.preemptions == 1
    assert scheduler.waiting == [last]
    assert last.table is None
    scheduler.remove(first)
    assert step(scheduler)[1] == [(2, 4, 5)]  # its first block was still known
    scheduler.blocks.check([last.table])  # type: ignore[list-item]


@pytest.mark.parametrize("preemptions", [0, 1])
def test_what_was_preempted_waits_for_a_spare_block(preemptions: int) -> None:
    scheduler = make(blocks=5, tokens=64)
    last = sequence(9, 2, 50)
    last.preemptions = preemptions
    scheduler.add(sequence(7, 1))
    scheduler.add(last)
    assert step(scheduler)[1] == ([(1, 0, 7)] if preemptions else [(1, 0, 7), (2, 0, 9)])


def test_a_prompt_that_waits_is_not_hashed_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(blocks=5, tokens=64)
    first, waits = sequence(7, 1), sequence(13, 2, 50)
    scheduler.add(first)
    scheduler.add(waits)
    opened: list[int] = []
    real = scheduler.blocks.open
    monkeypatch.setattr(scheduler.blocks, "open", lambda *args: opened.append(len(args[0])) or real(*args))  # type: ignore[func-returns-value]
    for _ in range(4):
        assert [item[0] for item in step(scheduler)[1]] == [1]
    assert opened == [7, 13]
    scheduler.remove(first)
    assert step(scheduler)[1] == [(2, 0, 13)]


def test_what_was_scheduled_already_is_preempted_too() -> None:
    """A sequence that decodes is scheduled before a prompt of higher rank."""
    scheduler = make(blocks=4, tokens=8)
    low = sequence(3, 1, priority=1)
    scheduler.add(low)
    step(scheduler)
    high = sequence(13, 2, 50)
    scheduler.add(high)
    assert step(scheduler)[1] == [(2, 0, 8)] and scheduler.waiting == [low]
    scheduler.remove(low)
    while high.remaining != 1:
        step(scheduler)
    scheduler.blocks.check([high.table])  # type: ignore[list-item]


def test_a_sequence_that_fills_all_blocks() -> None:
    scheduler = make(blocks=2, tokens=64)
    only = sequence(8, 1)
    scheduler.add(only)
    assert step(scheduler)[1] == [(1, 0, 8)]
    plan, ran = step(scheduler)
    assert ran == []
    assert plan.full == [only]
    assert not scheduler.has_work
    assert scheduler.blocks.free == 2


def test_a_preempted_sequence_that_no_longer_fits() -> None:
    scheduler = make(blocks=2, tokens=64)
    scheduler.add(sequence(9, 1))
    plan, ran = step(scheduler)
    assert ran == []
    assert len(plan.full) == 1
    assert not scheduler.has_work


def test_samples_share_their_prompt() -> None:
    scheduler = make(tokens=64)
    root = sequence(6, 1, samples=3)
    scheduler.add(root)
    plan = scheduler.schedule()
    scheduler.complete(plan)
    others = [Sequence(list(root.tokens), order=(1, i)) for i in (1, 2)]
    scheduler.fork(root, others)
    assert scheduler.blocks.free == 14
    for one in (root, *others):
        one.tokens.append(7)
    plan, ran = step(scheduler)
    assert ran == [(1, 6, 1)] * 3
    assert len(plan.copies) == 2  # the last one keeps the block
    tables = [one.table for one in (root, *others)]
    assert len({table.blocks[1] for table in tables if table is not None}) == 3
    assert len({table.blocks[0] for table in tables if table is not None}) == 1
    scheduler.blocks.check(tables)  # type: ignore[arg-type]


def test_blocks_behind_the_window_are_given_back() -> None:
    scheduler = make(blocks=5, size=4, tokens=8, window=6)
    long = sequence(60, 1)
    scheduler.add(long)
    while long.remaining > 1:
        plan, ran = step(scheduler)
        assert ran
        assert not plan.full
    assert scheduler.blocks.free >= 2


def test_groups_of_layers() -> None:
    """Only the group without a window keeps blocks of a long sequence, and a prefix is found by both."""
    groups = [BlockGroup(8), BlockGroup(4, window=6)]
    scheduler = make(blocks=14, tokens=8, groups=groups)
    long = sequence(60, 1)
    scheduler.add(long)
    while long.remaining > 1:
        plan, ran = step(scheduler)
        assert ran and not plan.full
    assert long.table is not None and scheduler.blocks.held(long.table) == 8 + 2
    # What it needs at a time is what counts for admission: eight blocks and four.
    scheduler = make(blocks=14, tokens=8, groups=groups)
    scheduler.add(sequence(1, 1, 500))
    step(scheduler)
    scheduler.add(sequence(60, 2))
    assert (2, 0, 7) in step(scheduler)[1]
    scheduler.remove(scheduler.running[0])
    while scheduler.running[0].remaining > 1:
        step(scheduler)
    scheduler.remove(scheduler.running[0])
    again = sequence(60, 3)
    scheduler.add(again)
    assert step(scheduler)[1] == [(3, 56, 4)] and again.cached == 56


def test_fewer_tokens_where_the_pool_is_small() -> None:
    """A step that has not enough blocks for its budget, but for some tokens."""
    scheduler = make(blocks=4, tokens=40, window=6)
    long = sequence(60, 1)
    scheduler.add(long)
    ran = []
    while long.remaining > 1:
        ran += step(scheduler)[1]
    assert [count for *_, count in ran][:3] == [16, 8, 8] and not scheduler.preemptions


def test_a_slot_for_each_sequence_that_runs() -> None:
    scheduler = make(blocks=4, tokens=64, sequences=3, slots=SlotManager(3))
    root = sequence(6, 1, samples=2)
    scheduler.add(root)
    plan = scheduler.schedule()
    scheduler.complete(plan)
    assert (root.slot, plan.state_copies) == (0, [])
    twin = Sequence(list(root.tokens), order=(1, 1))
    scheduler.fork(root, [twin])
    for one in (root, twin):
        one.tokens.append(7)
    plan, ran = step(scheduler)
    assert ran == [(1, 6, 1)] * 2
    assert plan.state_copies == [(root.slot, twin.slot)] == [(0, 1)]
    # The last one is preempted when blocks run out, and begins again without what its slot held.
    root.tokens += [1] * 8
    plan, ran = step(scheduler)
    assert ran == [(1, 7, 9)]
    assert (twin.slot, twin.computed, scheduler.slots and scheduler.slots.free) == (NO_SLOT, 0, 2)
    assert plan.state_copies == []
    scheduler.remove(root)
    assert scheduler.slots is not None and scheduler.slots.free == 3
    assert step(scheduler)[1] == [(1, 0, 8)]
    assert twin.slot == 0


def test_too_few_slots_or_prefixes_without_states() -> None:
    for blocks, slots in ((BlockManager(4, 4, prefix_cache=False), 2), (BlockManager(4, 4), 3)):
        with pytest.raises(ValueError, match=r"a slot for each of max_sequences, and no prefix cache .* snapshots"):
            Scheduler(blocks, 8, 3, slots=SlotManager(slots))


class States:
    """What the rows of a state pool hold, if each step is run: the tokens of its sequence so far."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def run(self, plan: Plan) -> None:
        for source, target in plan.state_copies:
            self.rows[target] = self.rows[source]
        for item in plan.items:
            before = self.rows[item.sequence.slot] if item.start else []
            assert before == item.sequence.tokens[: item.start], "the slot has another state"
            self.rows[item.sequence.slot] = item.sequence.tokens[: item.end]


def run_alone(scheduler: Scheduler, states: States, one: Sequence) -> list[tuple[int, int]]:
    """Steps until its prompt is computed: of each, start and count."""
    scheduler.add(one)
    ran = []
    while one.remaining:
        plan = scheduler.schedule()
        states.run(plan)
        scheduler.complete(plan)
        ran += [(item.start, item.count) for item in plan.items]
    scheduler.remove(one)
    return ran


def test_states_of_prefixes() -> None:
    """At the last block's end of a prompt, and where a second prompt goes apart, there is a snapshot."""
    scheduler, states = make(blocks=40, tokens=64, slots=SlotManager(8), snapshots=5), States()
    shared, snapshots = list(range(500, 513)), scheduler.blocks.snapshots
    assert snapshots is not None
    assert run_alone(scheduler, states, Sequence([*shared, *range(10)])) == [(0, 20), (20, 3)]
    assert len(snapshots) == 1
    # The same prompt, and one that goes on behind it.
    assert run_alone(scheduler, states, Sequence([*shared, *range(10)])) == [(20, 3)]
    assert run_alone(scheduler, states, Sequence([*shared, *range(20)])) == [(20, 12), (32, 1)]
    # Another one has the first three blocks in common: there is no state there yet.
    assert run_alone(scheduler, states, Sequence([*shared, *range(40, 50)])) == [(0, 12), (12, 8), (20, 3)]
    assert run_alone(scheduler, states, Sequence([*shared, *range(60, 70)])) == [(12, 8), (20, 3)]
    assert scheduler.prefix_hits == 3 and len(snapshots) == 5
    # With all rows taken, the least recently used one gives way: of the first prompt.
    run_alone(scheduler, states, Sequence(list(range(900, 910))))
    assert run_alone(scheduler, states, Sequence([*shared, *range(10)])) == [(12, 8), (20, 3)]
    scheduler.forget_states()
    assert len(snapshots) == 0
    assert run_alone(scheduler, states, Sequence([*shared, *range(10)])) == [(0, 20), (20, 3)]
    scheduler.blocks.check([])


def test_states_where_the_budget_cuts_prompts() -> None:
    """They are taken at blocks' ends, while rows are free, and take the place of no other."""
    scheduler, states = make(blocks=40, tokens=10, slots=SlotManager(8), snapshots=3), States()
    assert run_alone(scheduler, states, sequence(39)) == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 4), (36, 3)]
    snapshots = scheduler.blocks.snapshots
    assert snapshots is not None and len(snapshots) == 3
    # Of 8, 16 and 24; at 36 the first gave way.
    assert run_alone(scheduler, states, sequence(10)) == [(0, 8), (8, 2)]
    assert run_alone(scheduler, states, sequence(39)) == [(36, 3)]


def test_a_state_is_lost_with_its_pages() -> None:
    scheduler, states = make(blocks=6, tokens=64, slots=SlotManager(8), snapshots=3), States()
    run_alone(scheduler, states, sequence(10))
    run_alone(scheduler, states, sequence(24, 0, 100))
    assert scheduler.blocks.snapshots is not None and len(scheduler.blocks.snapshots) == 1
    assert run_alone(scheduler, states, sequence(10))[0][0] == 0


def test_copies_of_states_wait_for_a_step() -> None:
    scheduler = make(blocks=40, tokens=64, slots=SlotManager(8), snapshots=3)
    one = sequence(6)
    scheduler.add(one)
    scheduler.complete(scheduler.schedule())
    slot = one.slot
    scheduler.remove(one)
    assert scheduler.schedule().state_copies == []
    scheduler.add(sequence(3, 1, 50))
    assert scheduler.schedule().state_copies == [(slot, 8)]


def drafting(scheduler: Scheduler, one: Sequence, draft: list[int]) -> tuple[list[tuple[int, int, int]], int]:
    """A step in which the sequence wants these tokens verified: what ran, and how many of them were part of it."""
    one.draft, one.wanted = list(draft), len(draft)
    plan = scheduler.schedule()
    scheduler.complete(plan)
    return [(item.start, item.count, item.drafted) for item in plan.items], plan.drafted


def test_a_draft_is_behind_the_last_token() -> None:
    scheduler = make(blocks=6, size=4, tokens=16)
    one = sequence(7, 1)
    scheduler.add(one)
    step(scheduler)  # which appends a token
    assert (one.computed, len(one.tokens)) == (7, 8)
    assert drafting(scheduler, one, [20, 21, 22, 23, 24]) == ([(7, 6, 5)], 5)
    assert one.computed == 8  # the last token's own keys and values are there
    assert one.table is not None and len(one.table.blocks) == 4
    # One token of the draft is accepted, and one is new.
    one.tokens += [20, 30]
    scheduler.settle(one)
    assert (one.computed, len(one.tokens), one.wanted, one.draft) == (9, 10, 0, [])
    assert len(one.table.blocks) == 3
    scheduler.blocks.check([one.table])
    # The third block had a rejected token, and is not known before it has others.
    assert scheduler.blocks.open([*one.tokens, 31, 32, 33]).cached == 8
    assert drafting(scheduler, one, [40, 41])[0] == [(9, 3, 2)]
    one.tokens += [40, 41, 50]
    scheduler.settle(one)
    assert scheduler.blocks.open([*one.tokens, 31, 32, 33]).cached == 12


def test_drafts_take_what_is_left() -> None:
    scheduler = make(blocks=3, size=4, tokens=8)
    one = sequence(7, 1)
    scheduler.add(one)
    step(scheduler)
    assert drafting(scheduler, one, [20] * 20) == ([(7, 5, 4)], 4)  # blocks are left for so many
    assert one.draft == [20] * 4
    one.tokens.append(30)
    scheduler.settle(one)
    scheduler = make(blocks=20, size=4, tokens=8)
    one = sequence(7, 1)
    scheduler.add(one)
    step(scheduler)
    assert drafting(scheduler, one, [20] * 20) == ([(7, 8, 7)], 7)  # of the step's tokens
    one.tokens.append(30)
    scheduler.settle(one)
    scheduler.add(sequence(30, 2, 100))
    assert drafting(scheduler, one, [20] * 20) == ([(8, 4, 3), (0, 4, 0)], 3)  # half of what decoding leaves


def test_nothing_is_preempted_for_a_draft() -> None:
    scheduler = make(blocks=4, size=4, tokens=16)
    one, other = sequence(7, 1), sequence(7, 2, 100)
    for new in (one, other):
        scheduler.add(new)
    step(scheduler)
    assert drafting(scheduler, one, [20, 21, 22]) == ([(7, 1, 0), (7, 1, 0)], 0)
    assert (one.draft, scheduler.preemptions) == ([], 0)


def test_one_that_is_preempted_wants_nothing() -> None:
    scheduler = make(blocks=4, size=4, tokens=16)
    one, other = sequence(8, 1), sequence(7, 2, 100)
    for new in (one, other):
        scheduler.add(new)
    step(scheduler)
    assert drafting(scheduler, other, [20, 21])[0] == [(8, 1, 0)]
    assert (other.table, other.wanted, other.draft, scheduler.preemptions) == (None, 0, [], 1)


def speculative_step(scheduler: Scheduler, rng: random.Random) -> tuple[Plan, list[tuple[int, int, int]]]:
    """As ``step``, but that sequences want some tokens verified, of which some are accepted."""
    for one in scheduler.running:
        one.draft = [rng.randrange(1000) for _ in range(rng.randrange(7))] if one.remaining == 1 else []
        one.wanted = len(one.draft)
    plan = scheduler.schedule()
    scheduler.complete(plan)
    for item in plan.items:
        one = item.sequence
        assert item.drafted == len(one.draft)
        if one.remaining == 0:
            one.tokens += [*one.draft[: rng.randint(0, item.drafted)], 1000 + len(one.tokens)]
            if item.drafted:
                scheduler.settle(one)
            assert one.remaining == 1
    assert plan.drafted == sum(item.drafted for item in plan.items)
    return plan, [(item.sequence.order[0], item.start, item.count) for item in plan.items]


GROUPS = [BlockGroup(12), BlockGroup(4, window=5), BlockGroup(4, chunk=6)]


@pytest.mark.parametrize(
    ("groups", "states", "snapshots", "drafts"),
    [
        ([BlockGroup(4)], False, 0, False), ([BlockGroup(4, window=5)], False, 0, False),
        ([BlockGroup(4)], True, 0, False), ([BlockGroup(4)], True, 3, False), (GROUPS, True, 7, False),
        ([BlockGroup(4)], False, 0, True), ([BlockGroup(4, window=5)], False, 0, True), (GROUPS, False, 0, False),
        (GROUPS, False, 0, True),
    ],
)  # fmt: skip
def test_random_loads(groups: list[BlockGroup], states: bool, snapshots: int, drafts: bool) -> None:
    """Everything ends, nothing is lost, no step is over its budget."""
    rng = random.Random(1)
    for _ in range(40):
        budget = rng.randrange(4, 20)
        slots = SlotManager(4) if states else None
        blocks = rng.randrange(8, 20) if len(groups) == 1 else rng.randrange(14, 30)
        scheduler = make(blocks, tokens=budget, sequences=4, slots=slots, groups=groups, snapshots=snapshots)
        kept = States()
        goal: dict[int, int] = {}
        alive: list[Sequence] = []
        for order in range(15):
            new = sequence(rng.randrange(1, 25), order, rng.randrange(2) * 50, priority=rng.randrange(2))
            goal[order] = len(new.tokens) + rng.randrange(1, 8)
            alive.append(new)
            scheduler.add(new)
        for _ in range(2000):
            plan, ran = speculative_step(scheduler, rng) if drafts else step(scheduler, kept if states else None)
            assert plan.tokens == sum(count for _, _, count in ran) <= budget
            assert len(ran) == len({item[0] for item in ran}) <= 4
            for one in [one for one in alive if one in plan.full or len(one.tokens) >= goal[one.order[0]]]:
                alive.remove(one)
                scheduler.remove(one)
            if rng.random() < 0.02 and alive:
                scheduler.remove(alive.pop(rng.randrange(len(alive))))
            scheduler.blocks.check([one.table for one in alive if one.table is not None])
            for one in alive:
                # Only what is computed and stays is known, and nothing is held for rejected tokens.
                if one.table is not None:
                    assert len(one.table._hashes) <= one.computed // 4
                    for group, own in zip(groups, one.table.groups, strict=True):
                        assert len(own.blocks) <= -(-len(one.tokens) // group.size)
            if slots is not None:
                held = [one.slot for one in alive if one.table is not None]
                assert NO_SLOT not in held and len(set(held)) == len(held) == 4 - slots.free
                assert all(one.slot == NO_SLOT for one in alive if one.table is None)
            if not alive:
                break
        assert not scheduler.has_work
        assert scheduler.blocks.free == scheduler.blocks.count
