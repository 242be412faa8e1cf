"""Speculative decoding: what is proposed, and that nothing but the number of steps shows that it is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import VOCABULARY, FakeRunner, byte_tokenizer, greedy, next_logits, repetitive_logits
from untorch import InvalidArgumentError, ModelError
from untorch.llm import Engine, RequestOutput, SamplingParams
from untorch.llm.blocks import BlockGroup
from untorch.llm.speculation import Pace, PromptLookup, SpeculativeOptions, read_speculative

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def engine(runner: FakeRunner, **options: Any) -> Engine:
    given = {"max_batch_tokens": 40, "max_sequences": 8, "text": False, "speculative": "ngram", **options}
    return Engine(runner, **given)


def repetitive(**options: Any) -> FakeRunner:
    return FakeRunner(**{"blocks": 200, "model": repetitive_logits, **options})


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 40, 20)]


# What is proposed


def test_the_latest_of_the_longest_matches() -> None:
    lookup = PromptLookup(2, 3)
    assert lookup.propose([1, 2, 3, 9, 2, 3], 2) == [9, 2]
    assert lookup.propose([1, 2, 3, 9, 2, 3, 8, 2, 3], 1) == [8]
    assert lookup.propose([1, 2, 3, 9, 2, 3, 8, 2, 3, 1, 2, 3], 4) == [9, 2, 3, 8]
    assert lookup.propose([1, 2, 3, 9, 2, 3, 8, 2, 3, 1, 2, 3, 50], 4) == []
    assert PromptLookup(2, 5).propose([4, 5, 6, 5], 3) == []
    assert PromptLookup(1, 5).propose([4, 5, 6, 5], 3) == [6, 5, 6]
    assert PromptLookup(1, 1).propose([7], 3) == PromptLookup(1, 1).propose([], 3) == []


def test_a_match_that_reaches_the_end_repeats_itself() -> None:
    assert PromptLookup(2, 5).propose([1, 7, 7, 7], 4) == [7, 7, 7, 7]
    assert PromptLookup(2, 5).propose([1, 2, 3, 1, 2], 5) == [3, 1, 2, 3, 1]


def test_lookups_by_the_definition() -> None:
    rng = random.Random(0)
    for _ in range(200):
        least = rng.randrange(1, 4)
        most, width = rng.randrange(least, 6), rng.randrange(2, 5)
        lookup, tokens = PromptLookup(least, most), []
        for _ in range(rng.randrange(1, 8)):
            tokens += [rng.randrange(width) for _ in range(rng.randrange(1, 120))]
            assert lookup.propose(tokens, 3) == by_definition(tokens, least, most, 3)


def by_definition(tokens: Sequence[int], least: int, most: int, count: int) -> list[int]:
    for length in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                found = list(tokens)
                for i in range(count):
                    found.append(found[end + i])
                return found[len(tokens) :]
    return []


def test_the_pace_follows_what_is_accepted() -> None:
    pace = Pace(8)
    assert pace.length(1) == 8
    for generated, drafted, accepted, length in (
        (5, 8, 2, 3), (9, 3, 3, 6), (20, 6, 0, 3), (21, 3, 0, 1), (23, 1, 1, 2), (25, 2, 2, 4), (30, 4, 4, 8),
    ):  # fmt: skip
        pace.update(generated, drafted, accepted)
        assert pace.length(generated) == length
    for drafted in (8, 4, 2):
        pace.update(40, drafted, 0)
    for pause in (4, 8, 16, 32, 64, 64):
        pace.update(50, 1, 0)
        assert [pace.length(50), pace.length(50 + pause - 1), pace.length(50 + pause)] == [0, 0, 1]
    pace.update(200, 1, 1)
    assert pace.length(200) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("lookahead", 4, 2, 5), "Engine: speculative: expected 'ngram', 'draft' or None, got 'lookahead'"),
        ((True, 4, 2, 5), "Engine: speculative: expected 'ngram', 'draft' or None, got True"),
        (("ngram", 0, 2, 5), "Engine: num_speculative_tokens: expected an integer from 1 to 64, got 0"),
        (("ngram", 65, 2, 5), "Engine: num_speculative_tokens: expected an integer from 1 to 64, got 65"),
        (("ngram", 4, 0, 5), "Engine: prompt_lookup_min: expected an integer from 1 to 64, got 0"),
        (("ngram", 4, 3, 2),
         "Engine: prompt_lookup_max: expected an integer from 3 (prompt_lookup_min) to 64, got 2"),
        ((None, 4, 2, 2.5),
         "Engine: prompt_lookup_max: expected an integer from 2 (prompt_lookup_min) to 64, got 2.5"),
    ],
)  # fmt: skip
def test_wrong_options(given: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_speculative(*given)
    assert str(caught.value) == text


def test_options() -> None:
    assert read_speculative(None, 4, 2, 5) is None
    assert read_speculative("ngram", 3, 1, 1) == SpeculativeOptions("ngram", 3, 1, 1)


# In the engine


@pytest.mark.parametrize("gpu", [False, True])
def test_it_is_invisible(prompts: list[list[int]], gpu: bool) -> None:
    runner, plain = repetitive(gpu=gpu), repetitive(gpu=gpu)
    with engine(runner) as made, engine(plain, speculative=None) as other:
        results = made.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == [greedy(p, 40, repetitive_logits) for p in prompts]
        assert [r.token_ids for r in other.generate(prompts, GREEDY)] == [r.token_ids for r in results]
        stats, without = made.stats(), other.stats()
    assert stats.generated_tokens == 800
    assert stats.accepted_tokens > 300
    assert stats.draft_tokens > stats.accepted_tokens
    assert stats.accepted_tokens == sum(r.usage.accepted_tokens for r in results)
    assert stats.draft_tokens == sum(r.usage.draft_tokens for r in results)
    assert stats.drafts <= stats.draft_tokens <= 4 * stats.drafts
    assert stats.steps < without.steps
    assert (without.drafts, without.draft_tokens, without.accepted_tokens) == (0, 0, 0)
    assert stats.blocks_free == stats.blocks
    assert max(sum(count for _, count in plan) for plan in runner.plans) <= 40


@pytest.mark.parametrize("gpu", [False, True])
def test_tokens_that_depend_on_all_before(prompts: list[list[int]], gpu: bool) -> None:
    """Nearly every draft is wrong."""
    with engine(FakeRunner(blocks=200, gpu=gpu), prompt_lookup_min=1) as made:
        results = made.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == [greedy(p, 40) for p in prompts]
        stats = made.stats()
    assert stats.draft_tokens > stats.accepted_tokens


SAMPLED = [
    {"temperature": 0.4}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.7, "top_k": 5}, {"min_p": 0.1},
    {"temperature": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}, {"temperature": 0.3, "logprobs": 2},
    {"temperature": 0, "logit_bias": {3: 5.0}}, {"temperature": 0.3, "min_tokens": 20, "stop_token_ids": [1, 2, 3]},
    {"temperature": 0, "presence_penalty": 0.5, "logprobs": 0}, {"temperature": 0.2, "n": 3},
    {"temperature": 0.2, "n": 1, "best_of": 3}, {"temperature": 0, "stop_token_ids": list(range(0, 64, 9))},
    {"temperature": 0.3, "prompt_logprobs": 1},
]  # fmt: skip


@pytest.mark.parametrize("gpu", [False, True])
def test_a_seed_gives_the_same_tokens(prompts: list[list[int]], gpu: bool) -> None:
    """Whatever the request wants of its tokens, alone and beside others."""
    params = [SamplingParams(**{"seed": i, "max_tokens": 40, **fields}) for i, fields in enumerate(SAMPLED)]
    found: list[list[RequestOutput]] = []
    for options in ({}, {"speculative": None}):
        with engine(repetitive(gpu=gpu), prompt_lookup_min=1, **options) as made:
            together = made.generate(prompts[: len(params)], params)
            alone = [made.generate(prompt, own) for prompt, own in zip(prompts, params, strict=False)]
            found += [together, alone]
            stats = made.stats()
            assert stats.blocks_free == stats.blocks
        assert (stats.accepted_tokens > 100) == (options == {})
    for results in found[1:]:
        for one, other in zip(found[0], results, strict=True):
            assert one.completions == other.completions
            assert one.prompt_logprobs == other.prompt_logprobs


def test_the_distribution_of_sampled_tokens() -> None:
    """A model that is certain of a cycle but for one place: its tokens there come as often as they should."""

    def model(tokens: Sequence[int]) -> np.ndarray:
        logits = np.full(VOCABULARY, -30.0, np.float32)
        if tokens[-1] == 0:
            logits[[1, 2]] = np.log([0.7, 0.3])
        else:
            logits[0] = 0
        return logits

    with engine(FakeRunner(blocks=200, model=model, max_positions=900)) as made:
        output = made.generate([0, 1, 0, 1, 0], SamplingParams(max_tokens=800, seed=5, temperature=1.0))
    places = [token for token in output.token_ids if token]
    assert set(places) == {1, 2}
    assert abs(places.count(1) / len(places) - 0.7) < 0.06  # 2.6 standard deviations
    assert output.usage.accepted_tokens > 300


def test_one_request_does_not_speculate() -> None:
    with engine(repetitive()) as made:
        off = SamplingParams(temperature=0, max_tokens=40, speculative=False)
        one, other = made.generate([[1, 2, 3], [1, 2, 3]], [GREEDY, off])
        assert one.token_ids == other.token_ids == greedy([1, 2, 3], 40, repetitive_logits)
        assert one.usage.accepted_tokens > 0
        assert other.usage.draft_tokens == 0


def test_chunks_and_their_usage() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
    with engine(repetitive()) as made:
        handle = made.submit([1, 2, 3], params)
        chunks = list(handle)
        result = handle.result()
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [item for chunk in chunks for item in chunk.logprobs or ()] == result.logprobs
    assert max(len(chunk.token_ids) for chunk in chunks) > 1
    assert len(chunks) < 40
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == result.usage
    assert chunks[-1].finish_reason == "length"


def test_stop_strings_within_a_draft() -> None:
    """The text repeats itself, and its end is in the middle of what one step gives."""

    def model(tokens: Sequence[int]) -> np.ndarray:
        logits = np.zeros(258, np.float32)
        logits[(int(tokens[-1]) - 30) % 7 + 31] = 9
        return logits

    found = []
    for method in ("ngram", None):
        files = {"tokenizer.json": byte_tokenizer()}
        runner = FakeRunner(files=files, vocabulary=258, tokenizer="tokenizer.json", stop_ids=(257,), model=model)
        with engine(runner, text=True, speculative=method) as made:
            whole = made.generate([31], SamplingParams(temperature=0, max_tokens=40))
            stop = whole.text[22:25]
            outputs = [
                made.generate([31], SamplingParams(temperature=0, max_tokens=40, stop=stop, min_tokens=least))
                for least in (0, 20)
            ]
            found.append([(one.text, one.token_ids, one.completions[0].stop_reason) for one in (whole, *outputs)])
            accepted = made.stats().accepted_tokens
        assert (accepted > 0) == (method == "ngram")
    assert found[0] == found[1]
    assert len(found[0][1][1]) < len(found[0][2][1]) < 40


def test_grammars_hold_at_each_place() -> None:
    regex = "(left|right)(, (left|right)){5,7}"

    def model(tokens: Sequence[int]) -> np.ndarray:
        return np.random.default_rng(int(tokens[-1])).standard_normal(258).astype(np.float32)

    found = []
    for method in ("ngram", None):
        files = {"tokenizer.json": byte_tokenizer()}
        runner = FakeRunner(files=files, vocabulary=258, tokenizer="tokenizer.json", stop_ids=(257,), model=model)
        with engine(runner, text=True, speculative=method, prompt_lookup_min=1) as made:
            params = [SamplingParams(regex=regex, max_tokens=150, seed=i, temperature=0.5) for i in range(4)]
            results = made.generate([[1, 2, 3]] * 4, params)
            assert [r.error for r in results] == [None] * 4
            found.append([(r.text, r.token_ids, r.finish_reason) for r in results])
            accepted = made.stats().accepted_tokens
        assert (accepted > 0) == (method == "ngram")
    assert found[0] == found[1]
    assert {reason for _, _, reason in found[0]} == {"stop"}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_is_invisible(prompts: list[list[int]], prefix_cache: bool, gpu: bool) -> None:
    with engine(repetitive(blocks=22, gpu=gpu), prefix_cache=prefix_cache) as made:
        for _ in range(2):
            results = made.generate(prompts, GREEDY)
            assert [r.token_ids for r in results] == [greedy(p, 40, repetitive_logits) for p in prompts]
        stats = made.stats()
    assert stats.preemptions > 0 < stats.accepted_tokens
    assert stats.blocks_free == 22


@pytest.mark.parametrize("gpu", [False, True])
def test_groups_of_layers(prompts: list[list[int]], gpu: bool) -> None:
    groups = (BlockGroup(12), BlockGroup(4, window=7), BlockGroup(4, chunk=6))
    with engine(repetitive(blocks=48, gpu=gpu, groups=groups)) as made:
        for _ in range(2):
            results = made.generate(prompts, GREEDY)
            assert [r.token_ids for r in results] == [greedy(p, 40, repetitive_logits) for p in prompts]
        stats = made.stats()
    assert stats.preemptions > 0 < stats.accepted_tokens
    assert stats.blocks_free == 48


def test_known_prefixes_have_accepted_tokens_alone() -> None:
    with engine(repetitive()) as made:
        prompt = [1, 2, 3]
        first = made.generate(prompt, GREEDY)
        assert first.usage.accepted_tokens > 0
        longer = [*prompt, *first.token_ids]
        again = made.generate(longer, GREEDY)
        assert again.token_ids == greedy(longer, 40, repetitive_logits)
        assert again.usage.cached_tokens == 40  # 42 were computed, in blocks of 4


def test_windows() -> None:
    runner = repetitive(blocks=12, window=9, max_positions=150)
    # The tokens in front of a window are gone from the pages, so only a model that does not read them can be asked.
    runner.model = lambda tokens: np.random.default_rng(int(tokens[-1]) % 24).standard_normal(VOCABULARY)
    with engine(runner) as made:
        output = made.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=None))
        assert (len(output.token_ids), output.finish_reason) == (147, "length")
        assert output.token_ids == greedy([1, 2, 3], 147, runner.model)
        assert made.stats().accepted_tokens > 50
        assert made.stats().blocks_free == 12


def test_the_models_and_the_caches_length() -> None:
    everything = SamplingParams(temperature=0, max_tokens=None)
    for gpu in (False, True):
        runner = repetitive(max_positions=60, gpu=gpu)
        with engine(runner, num_speculative_tokens=16) as made:
            output = made.generate([1, 2, 3], everything)
            assert (output.token_ids, output.finish_reason) == (greedy([1, 2, 3], 57, repetitive_logits), "length")
        assert max(start + count for plan in runner.plans for start, count in plan) == 59
        with engine(repetitive(blocks=9, gpu=gpu), num_speculative_tokens=16) as made:
            output = made.generate([1, 2, 3], everything)
            assert (output.token_ids, output.finish_reason) == (greedy([1, 2, 3], 34, repetitive_logits), "length")
            assert made.generate([1], SamplingParams(temperature=0, max_tokens=9)).token_ids == (
                greedy([1], 9, repetitive_logits)
            )


def test_prompts_are_computed_beside_drafts() -> None:
    """Drafts leave at least half of what decoding leaves."""
    chunks: list[tuple[int, int, int]] = []
    prompt = list(range(60)) * 3

    def hook(plan: Any) -> None:
        chunks.extend(
            (item.end, item.count, plan.drafted) for item in plan.items if item.sequence.prompt_length == 180
        )  # fmt: skip

    runner = repetitive(hook=hook, max_positions=300)
    with engine(runner, max_batch_tokens=12, max_sequences=4, prompt_lookup_min=1, num_speculative_tokens=16) as made:
        runner.gate.clear()  # until all are here
        handles = [made.submit([i, 2, 3], SamplingParams(temperature=0, max_tokens=80)) for i in range(3)]
        long = made.submit(prompt, SamplingParams(temperature=0, max_tokens=2))
        runner.gate.set()
        assert long.result(30).token_ids == greedy(prompt, 2, repetitive_logits)
        for i, handle in enumerate(handles):
            assert handle.result(30).token_ids == greedy([i, 2, 3], 80, repetitive_logits)
    beside = [count for end, count, drafted in chunks if end < 180 and drafted]
    assert min(beside) >= (12 - 3) // 2


def test_cancelling_while_drafts_are_verified() -> None:
    for gpu in (False, True):
        with engine(repetitive(blocks=60, gpu=gpu)) as made:
            for _ in range(20):
                handles = [made.submit([i, 2, 3], SamplingParams(temperature=0, max_tokens=100)) for i in range(4)]
                stream = iter(handles[0])
                next(stream)
                handles[1].cancel()
                handles[0].cancel()
                kept = made.generate([9, 9], GREEDY)
                assert kept.token_ids == greedy([9, 9], 40, repetitive_logits)
                for handle in handles:
                    handle.cancel()
                    handle.wait()
            assert made.stats().blocks_free == 60


def test_a_fault_while_drafts_are_verified() -> None:
    def hook(plan: Any) -> None:
        if plan.drafted:
            raise RuntimeError("lost")

    with engine(repetitive(hook=hook)) as made:
        with pytest.raises(ModelError, match="the step failed: RuntimeError: lost"):
            made.generate([1, 2, 3], GREEDY)
        off = SamplingParams(temperature=0, max_tokens=9, speculative=False)
        assert made.generate([1], off).token_ids == greedy([1], 9, repetitive_logits)
        assert made.stats().running == 0
        assert made.stats().blocks_free == made.stats().blocks


@pytest.mark.parametrize("gpu", [False, True])
def test_logits_that_are_no_numbers_behind_a_draft(gpu: bool) -> None:
    def model(tokens: Sequence[int]) -> np.ndarray:
        return next_logits(tokens) * np.nan if len(tokens) > 20 else repetitive_logits([int(tokens[-1]) % 3])

    with engine(repetitive(gpu=gpu, model=model)) as made:
        handle = made.submit([1, 2, 3], SamplingParams(temperature=0.01, max_tokens=40, logprobs=0))
        with pytest.raises(ModelError, match="no token can be chosen: the model's logits are not numbers"):
            handle.result()
        assert made.stats().blocks_free == made.stats().blocks


def test_steps_are_enqueued_ahead_where_no_draft_is_expected() -> None:
    runner = FakeRunner(gpu=True)  # its text has no matches of two tokens here
    with engine(runner) as made:
        result = made.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=6))
        assert result.usage.draft_tokens == 0
        last = max(step for _, step in runner.events)
        assert runner.events[-3:] == [("run", last), ("wait", last - 1), ("wait", last)]
    runner = repetitive(gpu=True)
    with engine(runner) as made:
        result = made.generate([5, 6, 5, 6], SamplingParams(temperature=0, max_tokens=40))
        assert result.usage.accepted_tokens > 0
    steps = [what for what, _ in runner.events]
    assert steps.count("run") == steps.count("wait") < 40


def test_64_streams() -> None:
    async def one(made: Engine, number: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in made.stream([number, 5, 6], GREEDY):
            tokens += chunk.token_ids
        return tokens

    async def run() -> list[list[int]]:
        with engine(repetitive(blocks=120), max_sequences=32, max_batch_tokens=64) as made:
            return await asyncio.gather(*(one(made, i % VOCABULARY) for i in range(64)))

    assert asyncio.run(run()) == [greedy([i % VOCABULARY, 5, 6], 40, repetitive_logits) for i in range(64)]
