"""Drafts of a draft model: its pages follow those of the model, so one that is equal is always right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import VOCABULARY, FakeRunner, greedy, next_logits
from untorch import ModelError
from untorch.llm import Engine, SamplingParams
from untorch.llm.blocks import BlockGroup
from untorch.llm.settings import DraftSettings

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def engine(runner: FakeRunner, **options: Any) -> Engine:
    given = {"max_batch_tokens": 40, "max_sequences": 8, "text": False, "speculative": "draft", **options}
    return Engine(runner, **given)


def equal(**options: Any) -> FakeRunner:
    """Both models depend on all tokens that they find in their pages."""
    return FakeRunner(**{"blocks": 200, "draft": next_logits, **options})


def unlike(tokens: Sequence[int]) -> np.ndarray:
    """A draft model that is right half of the time."""
    logits = next_logits(tokens)
    return logits if len(tokens) % 2 or len(tokens) % 3 else -logits


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 40, 20)]


@pytest.mark.parametrize("gpu", [False, True])
def test_an_equal_model_is_always_right(prompts: list[list[int]], gpu: bool) -> None:
    runner = equal(gpu=gpu)
    with engine(runner, max_batch_tokens=64) as made:
        for _ in range(2):  # the second time with known prefixes
            results = made.generate(prompts, GREEDY)
            assert [r.token_ids for r in results] == [greedy(p, 30) for p in prompts]
        stats = made.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 20 * 2 * 20
    assert stats.cached_tokens > 0
    assert stats.blocks_free == stats.blocks
    # Two tokens where a draft was accepted as a whole: its last one and the one behind it.
    assert {count for items in runner.proposals for start, count in items if start >= 40} == {1, 2}


@pytest.mark.parametrize(
    "groups", [(BlockGroup(8), BlockGroup(4, window=7)), (BlockGroup(8, window=12), BlockGroup(4, window=7))]
)
def test_groups_of_layers(prompts: list[list[int]], groups: tuple[BlockGroup, ...]) -> None:
    """The draft model's pages are those of the first group, which keeps them all."""
    with engine(equal(groups=groups, blocks=900), max_batch_tokens=64) as made:
        for _ in range(2):
            results = made.generate(prompts, GREEDY)
            assert [r.token_ids for r in results] == [greedy(p, 30) for p in prompts]
        stats = made.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 20 * 2 * 20 and stats.cached_tokens > 0


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("blocks", [200, 22])
def test_it_is_invisible(prompts: list[list[int]], gpu: bool, blocks: int) -> None:
    with engine(equal(gpu=gpu, draft=unlike, blocks=blocks)) as made:
        results = made.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == [greedy(p, 30) for p in prompts]
        stats = made.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 200
    assert (stats.preemptions > 0) == (blocks == 22)
    assert stats.blocks_free == blocks


@pytest.mark.parametrize("gpu", [False, True])
def test_pages_of_both_models_when_blocks_run_out(prompts: list[list[int]], gpu: bool) -> None:
    with engine(equal(gpu=gpu, blocks=22)) as made:
        results = made.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == [greedy(p, 30) for p in prompts]
        stats = made.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_samples_share_the_pages_of_both() -> None:
    with engine(equal()) as made:
        for prompt in (list(range(9)), [7]):
            same = made.generate(prompt, SamplingParams(n=3, temperature=0, max_tokens=12))
            assert [item.token_ids for item in same.completions] == [greedy(prompt, 12)] * 3
        stats = made.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 0


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.7, "min_p": 0.01}, {"top_k": 4}])
def test_a_seed_gives_the_same_tokens(prompts: list[list[int]], gpu: bool, fields: dict[str, Any]) -> None:
    """And an equal model draws the same ones with the same numbers."""
    params = [SamplingParams(seed=i, max_tokens=30, temperature=0.9, **fields) for i in range(len(prompts))]
    with engine(equal(gpu=gpu), max_batch_tokens=64) as made, engine(equal(gpu=gpu), speculative=None) as other:
        results = made.generate(prompts, params)
        assert [r.token_ids for r in results] == [r.token_ids for r in other.generate(prompts, params)]
        stats = made.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 200
    with engine(equal(gpu=gpu, draft=unlike)) as made:
        assert [r.token_ids for r in made.generate(prompts, params)] == [r.token_ids for r in results]
        assert made.stats().draft_tokens > made.stats().accepted_tokens > 0


def test_requests_beside_each_other(prompts: list[list[int]]) -> None:
    """Some without drafts, with penalties or logprobs, near their end."""
    params = [
        SamplingParams(seed=i, **fields)
        for i, fields in enumerate([
            {"temperature": 0, "speculative": False, "max_tokens": 20}, {"logprobs": 1, "max_tokens": 25},
            {"temperature": 0, "presence_penalty": 1.0, "max_tokens": 9}, {"min_tokens": 9, "stop_token_ids": [3, 4, 5, 6]},
            {"temperature": 0, "max_tokens": 2}, {"temperature": 0, "max_tokens": 3}, {"n": 2, "max_tokens": 7},
        ])
    ]  # fmt: skip
    found = []
    for method in ("draft", None):
        with engine(equal(draft=unlike), speculative=method) as made:
            found.append([r.completions for r in made.generate(prompts[: len(params)], params)])
            assert made.stats().blocks_free == 200
    assert found[0] == found[1]


def test_tokens_that_the_draft_model_has_not_computed() -> None:
    """While nothing is proposed, its pages stay behind; it goes on in chunks of a step's tokens."""
    wrong = [True]

    def draft(tokens: Sequence[int]) -> np.ndarray:
        return -next_logits(tokens) if wrong[0] else next_logits(tokens)

    def hook(plan: Any) -> None:
        wrong[0] = len(runner.plans) < 60

    runner = equal(draft=draft, hook=hook)
    with engine(runner, max_batch_tokens=8) as made:
        output = made.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=180))
        assert output.token_ids == greedy([1, 2, 3], 180)
        assert output.usage.accepted_tokens > 30
    counts = [count for items in runner.proposals for _, count in items]
    assert max(counts) == 8


def test_windows_and_a_smaller_vocabulary() -> None:
    runner = equal(window=9, blocks=60)
    runner.model = runner.draft = lambda tokens: next_logits([int(tokens[-1])])
    object.__setattr__(runner.settings, "draft", DraftSettings(VOCABULARY // 2, 1, "float32", ((16, "x"),)))
    with engine(runner) as made:
        output = made.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=100))
        assert output.token_ids == greedy([1, 2, 3], 100, runner.model)
        assert made.stats().blocks_free == 60
    assert output.usage.draft_tokens > 0


@pytest.mark.parametrize("gpu", [False, True])
def test_a_fault_of_the_draft_model(gpu: bool) -> None:
    def draft(tokens: Sequence[int]) -> np.ndarray:
        if len(tokens) >= 9:
            raise RuntimeError("lost")
        return next_logits(tokens)

    with engine(equal(draft=draft, gpu=gpu)) as made:
        with pytest.raises(ModelError, match="the step failed: RuntimeError: lost"):
            made.generate([1, 2, 3], GREEDY)
        assert made.generate([1], SamplingParams(temperature=0, max_tokens=4)).token_ids == greedy([1], 4)
        assert made.stats().blocks_free == made.stats().blocks


def test_proposals_that_are_no_numbers() -> None:
    with engine(equal(draft=lambda tokens: next_logits(tokens) * np.nan)) as made:
        for params in (GREEDY, SamplingParams(seed=1, max_tokens=9)):
            result = made.generate([1, 2, 3], params)
            assert result.error is None
        assert made.generate([1, 2, 3], GREEDY).token_ids == greedy([1, 2, 3], 30)
