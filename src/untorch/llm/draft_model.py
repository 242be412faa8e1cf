"""Speculative decoding by a draft model: a smaller model of the package proposes tokens, one after the other.

Its keys and values lie in a pool of its own, in the blocks that the sequence has in the model's pool. So whatever the
scheduler does with blocks holds for both: sharing, copies, preemption. It computes prompts in the steps in which the
model does, and tokens of the output when the sequence gets a draft. Its token is drawn with the random number that the
model's token is drawn with afterwards: the closer its distribution, the more tokens are equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from untorch.llm.logits import Choice
from untorch.llm.request import Sample
from untorch.llm.runner import Runner
from untorch.llm.sampler import Sampler
from untorch.llm.scheduler import Plan, Scheduled
from untorch.llm.sequence import Sequence
from untorch.llm.speculation import SpeculativeOptions, Speculator

__all__ = ["DraftModelSpeculator"]


class DraftModelSpeculator(Speculator):
    """max_tokens: the most that the draft model computes before it proposes."""

    def __init__(self, options: SpeculativeOptions, runner: Runner, max_tokens: int) -> None:
        super().__init__(options, runner.settings.max_positions)
        assert runner.settings.draft is not None
        self._runner, self._max_tokens = runner, max_tokens
        self._sampler = Sampler(min(runner.settings.vocabulary, runner.settings.draft.vocabulary))

    def prepare(self, running: Iterable[Sequence]) -> None:
        """Sets ``wanted``."""
        for sequence in running:
            sequence.draft = []
            sequence.wanted = self.length(sequence.owner) if sequence.remaining == 1 else 0

    def expects_drafts(self, samples: Iterable[Sample]) -> bool:
        """Whether one of them gets a draft."""
        return any(self.length(sample) > 0 for sample in samples)

    def fill(self, plan: Plan) -> None:
        """Computes the plan's tokens of prompts, what sequences with drafts have not computed yet, and drafts."""
        known, rows, drafted = self._known(plan)
        if not known.items and not known.copies:
            return
        logits = self._runner.propose(known, rows)
        for item in known.items:
            item.sequence.draft_computed = item.end
        before, chosen, place = known, [item.sequence for item in drafted], 0
        choices: list[tuple[list[Sequence], Choice]] = []
        while drafted:
            choices.append((chosen, self._sampler.draft(logits, [one.owner.state for one in chosen], place)))
            place += 1
            drafted = [item for item in drafted if item.drafted > place]
            following = [item.sequence for item in drafted]
            if not following:
                break
            items = [Scheduled(one, len(one.tokens) - 1 + place, 1) for one in following]
            # Where tokens are chosen, the next ones are computed from them there, unless some sequences have enough.
            ahead = choices[-1][1].device if logits.can_choose and len(following) == len(chosen) else None
            if ahead is None:
                _take(choices)
            is_next = ahead is not None and len(before.items) == len(items) == before.tokens
            plan = Plan(items, tokens=len(items), behind=before if is_next else None)
            before.behind = None
            logits = self._runner.propose(plan, list(range(len(items))), ahead)
            before, chosen = plan, following
        _take(choices)

    def update(self, sample: Sample, drafted: int, accepted: int) -> None:
        """What became of a draft. Its last token was not computed by the draft model."""
        super().update(sample, drafted, accepted)
        sample.sequence.draft_computed += min(accepted, drafted - 1)

    def _known(self, plan: Plan) -> tuple[Plan, list[int], list[Scheduled]]:
        """What the draft model computes of known tokens; rows behind which drafts begin; their items of the plan."""
        known, rows, drafted = Plan(copies=plan.copies), [], []
        for item in plan.items:
            sequence = item.sequence
            start, end = sequence.draft_computed, item.end - item.drafted
            is_prompt = item.count - item.drafted > 1 or sequence.owner.state.generated == 0
            if start >= end or not (item.drafted or is_prompt):
                continue
            count = min(end - start, self._max_tokens - known.tokens)
            if item.drafted and count < end - start:
                plan.drop_draft(item)  # it has to compute more than one step may
            if count <= 0:
                continue
            known.add(Scheduled(sequence, start, count))
            if item.drafted:
                rows.append(known.tokens - 1)
                drafted.append(item)
        return known, rows, drafted


def _take(choices: list[tuple[list[Sequence], Choice]]) -> None:
    """Waits for the tokens, and puts them into the drafts."""
    for sequences, choice in choices:
        for sequence, token in zip(sequences, choice.wait().tolist(), strict=True):
            sequence.draft.append(max(token, 0))  # -1: its logits are no numbers; any token may be proposed
    choices.clear()
