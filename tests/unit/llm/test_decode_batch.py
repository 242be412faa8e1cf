"""What a persistent batch knows of its samples, step after step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.llm.decode_batch import DecodeBatch
from untorch.llm.handle import Generation
from untorch.llm.params import SamplingParams
from untorch.llm.request import Request, Sample
from untorch.llm.sampler import Sampler, SamplerState
from untorch.llm.sequence import Sequence

VOCABULARY = 50


def sample(prompt: int = 3, **fields: Any) -> Sample:
    params = SamplingParams(**{"temperature": 0, "max_tokens": None, **fields})
    request = Request(list(range(prompt)), params, (9, 8), None, None, Generation(lambda: None))
    return Sample(request, Sequence(list(range(prompt))), SamplerState(params))


def batch(samples: list[Sample], max_positions: int = 100) -> DecodeBatch:
    draws = Sampler(VOCABULARY).draws([one.state for one in samples], range(len(samples)))
    return DecodeBatch(samples, draws, VOCABULARY, max_positions)


def may_end(made: DecodeBatch, *tokens: int) -> list[bool]:
    return made.may_end(np.array(tokens)).tolist()


def test_tokens_that_end_a_sample() -> None:
    made = batch(
        [sample(), sample(ignore_eos=True), sample(stop_token_ids=[5]), sample(ignore_eos=True, stop_token_ids=[5])]
    )
    assert may_end(made, 1, 1, 1, 1) == [False] * 4
    assert may_end(made, 8, 8, 8, 8) == [True, False, True, False]
    assert may_end(made, 9, 9, 9, 9) == [True, False, True, False]
    assert may_end(made, 5, 5, 5, 5) == [False, False, True, True]
    assert may_end(batch([sample(ignore_eos=True)]), 9) == [False]


def test_what_is_no_token() -> None:
    assert may_end(batch([sample(), sample(), sample()]), -1, VOCABULARY, VOCABULARY - 1) == [True, True, False]


def test_text_that_may_end_a_sample() -> None:
    assert may_end(batch([sample(stop="end"), sample()]), 1, 1) == [True, False]


@pytest.mark.parametrize(("max_positions", "steps"), [(100, [4, 2]), (6, [3, 2]), (5, [2, 2])])
def test_the_last_token_of_a_length(max_positions: int, steps: list[int]) -> None:
    """``steps``: at which each sample ends. The one with fewer tokens to come says how many steps are enqueued."""
    made = batch([sample(max_tokens=4), sample(max_tokens=2)], max_positions)
    ahead = 1
    while made.goes_on:
        made.draws_behind()
        ahead += 1
    assert ahead == min(steps)
    for given in range(1, max(steps) + 1):
        assert may_end(made, 1, 1) == [given >= own for own in steps]


def test_tokens_that_are_there_already_count() -> None:
    one = sample(max_tokens=4)
    one.extend(1)
    made = batch([one])
    assert [may_end(made, 1) for _ in range(3)] == [[False], [False], [True]]


def test_a_sample_takes_a_token() -> None:
    one, silent = sample(), sample()
    chunk = one.extend(7)
    assert chunk is not None
    assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ([7], "", None)
    assert one.token_ids == [7] and one.state.generated == 1
    silent.request.streams = False
    assert silent.extend(7) is None and silent.token_ids == [7]


def test_draws_of_greedy_samples_are_made_once() -> None:
    made = batch([sample(), sample()])
    assert made.draws_behind() is made.draws_behind()


def test_random_numbers_are_those_of_each_sample() -> None:
    fields = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}
    made = batch([sample(seed=3, **fields), sample(), sample(seed=4, **fields)])
    alone = [SamplerState(SamplingParams(seed=seed, **fields)) for seed in (3, 4)]
    expected = [[state.uniform() for _ in range(40)] for state in alone]
    for step in range(1, 40):  # the first numbers were those of the first step
        draws = made.draws_behind()
        np.testing.assert_allclose(draws.uniform, [expected[0][step], 0, expected[1][step]], rtol=1e-6)
        assert draws.uniform.dtype == np.float32
        assert draws.rows.tolist() == [0, 1, 2] and draws.top_k.tolist() == [4, 0, 4]
