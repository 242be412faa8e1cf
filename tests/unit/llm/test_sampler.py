"""The sampler against straightforward computations, and its distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.llm.logits import Logits
from untorch.llm.params import SamplingParams
from untorch.llm.sampler import Sampler, SamplerState, _inverse, _nucleus, token_logprobs

WIDTH = 40


def state(prompt: tuple[int, ...] = (), counts: dict[int, int] | None = None, **fields: Any) -> SamplerState:
    given = fields.pop("state", {})
    made = SamplerState(SamplingParams(**fields), frozenset(prompt), **given)
    for token, count in (counts or {}).items():
        for _ in range(count):
            made.append(token)
    return made


def choose(logits: np.ndarray, *states: SamplerState) -> list[int]:
    return [item.token for item in Sampler(logits.shape[1]).sample(Logits(logits), states)]


def frequencies(logits: np.ndarray, draws: int = 4000, **fields: Any) -> np.ndarray:
    own = state(seed=5, **fields)
    items = Sampler(len(logits)).sample(Logits(np.repeat(logits[None], draws, 0)), [own] * draws)
    found = [item.token for item in items]
    return np.bincount(found, minlength=len(logits)) / draws


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((2, WIDTH), np.float32)
    logits[0, [7, 9]] = 1
    logits[1, 3] = 2
    assert choose(logits, state(temperature=0), state(temperature=1e-6)) == [7, 3]


def test_the_logits_stay() -> None:
    logits = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    before = logits.copy()
    choose(logits, state(logit_bias={1: 5}, repetition_penalty=2, prompt=(1, 2), top_k=3))
    assert np.array_equal(logits, before)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.full((1, WIDTH), -5, np.float32)
    logits[0, 1], logits[0, 2], logits[0, 3] = 2.0, 1.5, -1.0
    assert choose(logits, state(prompt=(1,), temperature=0, repetition_penalty=2.0)) == [2]
    assert choose(logits, state(prompt=(1,), counts={2: 1}, temperature=0, repetition_penalty=2.0)) == [1]
    lower = np.full((1, WIDTH), -9, np.float32)
    lower[0, 3], lower[0, 4] = -1.0, -1.5
    assert choose(lower, state(prompt=(3,), temperature=0, repetition_penalty=2.0)) == [4]


def test_presence_and_frequency_penalties_see_the_output_alone() -> None:
    logits = np.zeros((1, WIDTH), np.float32)
    logits[0, 1], logits[0, 2], logits[0, 3] = 3.0, 2.5, 2.0
    assert choose(logits, state(prompt=(1,), temperature=0, presence_penalty=2)) == [1]
    assert choose(logits, state(counts={1: 1}, temperature=0, presence_penalty=2)) == [2]
    assert choose(logits, state(counts={1: 1, 2: 1}, temperature=0, frequency_penalty=1.5)) == [3]
    assert choose(logits, state(counts={1: 3, 2: 1}, temperature=0, frequency_penalty=0.4)) == [2]


def test_rows_have_their_own_settings() -> None:
    logits = np.zeros((4, WIDTH), np.float32)
    logits[:, 1], logits[:, 2] = 3.0, 2.5
    states = (
        state(temperature=0),
        state(temperature=0, counts={1: 1}, presence_penalty=1),
        state(temperature=0, logit_bias={30: 100}),
        state(temperature=0, min_tokens=1, state={"stop_ids": (1, 2)}),
    )
    assert choose(logits, *states) == [1, 2, 30, 0]


def test_min_tokens_hold_stops_back_until_then() -> None:
    logits = np.zeros((1, WIDTH), np.float32)
    logits[0, 9] = 1
    early = state(temperature=0, min_tokens=2, counts={3: 1}, state={"stop_ids": (9,)})
    late = state(temperature=0, min_tokens=1, counts={3: 1}, state={"stop_ids": (9,)})
    assert choose(logits, early) != [9]
    assert choose(logits, late) == [9]


def test_temperature_is_a_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    weights = np.exp(logits / 0.7)
    np.testing.assert_allclose(frequencies(logits, temperature=0.7), weights / weights.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, 2), ({"top_k": 1}, 1), ({"top_p": 0.6}, 2), ({"top_p": 0.01}, 1), ({"min_p": 0.3}, 2),
        ({"top_k": 3, "top_p": 0.85}, 2), ({"min_p": 0.1, "top_p": 0.99}, 3), ({"top_k": 400}, 6),
    ],
)  # fmt: skip
def test_what_is_left_out(fields: dict[str, Any], kept: int) -> None:
    weights = np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    order = np.random.default_rng(1).permutation(6)
    logits = np.empty(6, np.float32)
    logits[order] = np.log(weights)
    expected = np.zeros(6)
    expected[order[:kept]] = weights[:kept] / weights[:kept].sum()
    np.testing.assert_allclose(frequencies(logits, **fields), expected, atol=0.03)


def test_top_p_over_many_tokens() -> None:
    ids, kept = _nucleus(np.ones(3000), 3000, 0.9)
    assert ids.tolist() == list(range(2700))
    peak = np.ones(3000)
    peak[17] = 3000
    ids, kept = _nucleus(peak / 3000, 3000, 0.4)
    assert (ids.tolist(), kept.tolist()) == ([17], [1.0])
    assert _nucleus(np.arange(5000) / 5000, 7, 1.0)[0].tolist() == list(range(4993, 5000))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_nucleus(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    width = data.draw(st.integers(1, 6000))
    scale = data.draw(st.sampled_from([0.1, 3, 20]))
    scores = (rng.standard_normal(width) * scale).round(data.draw(st.integers(0, 3)))  # with ties
    weights = np.exp(scores - scores.max()).astype(np.float32)
    top_k, top_p = data.draw(st.integers(1, width + 3)), data.draw(st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]))
    ids, kept = _nucleus(weights, top_k, top_p)
    order = np.lexsort((np.arange(width), -weights))[:top_k]
    assert sorted(order[: len(ids)]) == ids.tolist()
    assert np.array_equal(kept, weights[ids])
    wanted = top_p * weights[order].sum(dtype=np.float64)
    found = kept.sum(dtype=np.float64)
    assert found >= wanted * (1 - 1e-9)
    if top_p < 1:
        assert found - kept.min() <= wanted * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 900))
def test_the_inverse_of_the_distribution(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((5, width)).astype(np.float32) * (rng.random((5, width)) < 0.3)
    weights[:, rng.integers(width)] = 1
    uniform = np.array([0.0, 0.3, 0.7, 0.999, np.nextafter(1.0, 0)])
    found = _inverse(weights, uniform)
    running = weights.astype(np.float64).cumsum(axis=1)
    for i, token in enumerate(found):
        assert weights[i, token] > 0
        target = uniform[i] * running[i, -1]
        assert running[i, token] >= target - 1e-9
        assert running[i, token] - weights[i, token] <= target + 1e-9


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    logits = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    alone, sampler = state(seed=3, top_p=0.9), Sampler(WIDTH)
    expected = [sampler.sample(Logits(logits), [alone])[0].token for _ in range(20)]
    own = state(seed=3, top_p=0.9)
    found = []
    for step in range(20):
        others = [state(seed=step), state(top_k=5), state(temperature=0)]
        found.append(sampler.sample(Logits(np.repeat(logits, 4, 0)), [others[0], own, *others[1:]])[1].token)
    assert found == expected
    assert len(set(expected)) > 3
    other = own.fork(1)
    assert [sampler.sample(Logits(logits), [other])[0].token for _ in range(20)] != expected


def test_without_a_seed_requests_differ() -> None:
    logits = np.zeros((1, 1000), np.float32)
    assert choose(logits, state()) != choose(logits, state()) or choose(logits, state()) != choose(logits, state())


def test_logprobs_are_the_models_own() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 0.0]], np.float32)
    item = Sampler(4).sample(Logits(logits), [state(temperature=0, logit_bias={2: 50}, logprobs=2)])[0]
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert item.token == 2
    assert item.logprobs is not None
    assert item.logprobs.rank == 2
    np.testing.assert_allclose(item.logprobs.logprob, expected[2], rtol=1e-6)
    assert [token for token, _ in item.logprobs.top] == [1, 2]
    assert token_logprobs(logits[0], 0, 0).top == ()
    assert len(token_logprobs(logits[0], 0, 99).top) == 4


def test_rows_without_a_token() -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[0], logits[1, 2] = -np.inf, np.nan
    found = Sampler(4).sample(Logits(logits), [state(), state(), state(temperature=0)])
    assert [item.problem is None for item in found] == [False, False, True]
    assert found[0].problem == "the model's logits are not numbers, or no token is allowed"


def test_tokens_beyond_the_vocabulary_are_never_chosen() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, 7] = 9
    assert Sampler(6).sample(Logits(logits), [state(temperature=0)])[0].token < 6


def test_random_numbers_that_are_looked_at_come_later() -> None:
    first, second = state(seed=7), state(seed=7)
    expected = [second.uniform() for _ in range(6)]
    assert first.upcoming(3) == expected[:3]
    assert [first.uniform(), first.uniform()] == expected[:2]
    assert first.upcoming(2) == expected[2:4]
    assert first.upcoming(0) == []
    assert [first.uniform() for _ in range(4)] == expected[2:]


def test_random_numbers_are_the_generators() -> None:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([7, 0])))
    own = state(seed=7)
    assert [own.uniform() for _ in range(50)] == [generator.random() for _ in range(50)]


def test_draws_for_drafts() -> None:
    own, same, plain = state(seed=7, top_k=3, temperature=0.5), state(seed=7), state(temperature=0)
    sampler = Sampler(WIDTH)
    draws = sampler.draws_ahead([own, plain], [0, 3], [3, 2])
    assert draws.rows.tolist() == [0, 1, 2, 3, 4]
    assert draws.temperature.tolist() == [0.5] * 3 + [0] * 2 and draws.top_k.tolist() == [3] * 3 + [0] * 2
    numbers = [np.float32(same.uniform()) for _ in range(3)]
    assert draws.uniform.tolist() == [*numbers, 0, 0] and draws.uniform.dtype == np.float32
    sampler.take_numbers([own, plain])
    assert sampler.draws([own], [0]).uniform.tolist() == numbers[1:2]
