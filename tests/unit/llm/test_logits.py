"""Logits on a GPU: what is chosen there, and what brings them to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from untorch.llm.logits import DeviceLogits, DeviceMethods
from untorch.llm.params import SamplingParams
from untorch.llm.sampler import Sampler, SamplerState, uniform_numbers


class Array:
    """Of a GPU; counts how often it is copied to the host."""

    def __init__(self, values: Any) -> None:
        self.values, self.copies = np.asarray(values), 0
        self.shape = self.values.shape

    def copy_to_host_async(self) -> None:
        self.begun = True

    def numpy(self) -> Any:
        self.copies += 1
        return self.values


def state(**fields: Any) -> SamplerState:
    return SamplerState(SamplingParams(**fields))


def on_gpu(tokens: list[int]) -> tuple[DeviceLogits, Array, list[Any]]:
    calls: list[Any] = []

    def method(*args: Any) -> Array:
        calls.append(args)
        return Array(tokens)

    values = Array(np.eye(4, 6, dtype=np.float32))
    return DeviceLogits(values, 3, DeviceMethods(6, method)), values, calls


def test_tokens_are_chosen_there() -> None:
    logits, values, calls = on_gpu([2, 5, -1, 6])
    states = [state(temperature=0), state(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=1), state(), state()]
    found = Sampler(6).sample(logits, states, [0, 0, 2, 1])
    assert [one.token for one in found] == [2, 5, -1, -1] and values.copies == 0
    assert [one.problem is None for one in found] == [True, True, False, False]
    _, rows, temperature, top_k, top_p, min_p, uniform = calls[0]
    assert rows.tolist() == [0, 0, 2, 1] and top_k.tolist() == [0, 3, 0, 0]
    np.testing.assert_allclose(temperature, [0, 0.5, 1, 1])
    np.testing.assert_allclose(top_p, [1, 0.9, 1, 1])
    np.testing.assert_allclose(min_p, [0, 0.1, 0, 0], rtol=1e-6)
    assert uniform[0] == 0 and all(0 <= number < 1 for number in uniform)
    assert {array.dtype for array in (temperature, top_p, min_p, uniform)} == {np.dtype(np.float32)}


def test_draws_are_padded() -> None:
    logits, _, calls = on_gpu([2, 5, 0, 0])
    logits._padded = lambda count: 4
    states = [state(temperature=0.5, seed=1), state(top_k=2, seed=2)]
    draws = Sampler(6).draws(states, [1, 2])
    choice = logits.choose(draws)
    _, rows, *_, uniform = calls[0]
    assert rows.tolist() == [1, 2, 0, 0] and rows.dtype == np.int64
    assert uniform[1] > 0 and uniform[2:].tolist() == [0, 0] and uniform.dtype == np.float32
    # The copy to the host has begun, and padding is not among what it gives.
    assert choice.device.begun and choice.device.copies == 0
    assert [one.token for one in Sampler(6).finish(choice, states)] == [2, 5]
    # The step behind has a row for each, other random numbers, and the rest as before.
    behind = draws.behind(uniform_numbers(states))
    assert behind.rows.tolist() == [0, 1] and behind.top_k is draws.top_k
    assert not np.isclose(behind.uniform, draws.uniform).any()


FIELDS: list[dict[str, Any]] = [
    {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"min_tokens": 1}, {"frequency_penalty": 0.5}, {"n": 1, "best_of": 2},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS)
def test_what_brings_them_to_the_host_with_an_earlier_package(fields: dict[str, Any]) -> None:
    logits, values, calls = on_gpu([0, 0])
    assert logits.can_choose and not logits.can_process
    states = [state(temperature=0), SamplerState(SamplingParams(temperature=0, **fields), stop_ids=(5,))]
    found = Sampler(6).sample(logits, states, [1, 2])
    assert found[0].token == 1 and not calls and values.copies == 1
    assert logits.numpy().shape == (3, 6) and values.copies == 1


@pytest.mark.parametrize("fields", FIELDS)
def test_what_is_processed_there(fields: dict[str, Any]) -> None:
    logits, values, calls = on_gpu([2, 5, 0, 0])
    processed, computed = [], []

    def process(*args: Any) -> str:
        processed.append(args)
        return "processed"

    def logprobs(*args: Any) -> list[Array]:
        computed.append(args)
        return [Array(np.arange(4.0)), Array(np.arange(4) + 1), Array(np.full((4, 20), -2.0)), Array(np.zeros((4, 20)))]

    logits._methods = DeviceMethods(6, logits._methods.choose, process, logprobs)
    logits._padded = lambda count: 4
    states = [state(temperature=0), SamplerState(SamplingParams(temperature=0, **fields), stop_ids=(5,))]
    found = Sampler(6).sample(logits, states, [1, 2])
    assert [one.token for one in found] == [2, 5] and values.copies == 0
    [(given, rows, *_)] = calls
    if states[1].changes_logits:
        [(tensor, places, masks, mask_rows, at, factor, shift)] = processed
        assert tensor is values and places.tolist() == [1, 2, 0, 0] and masks.tolist() == [[-1]]
        assert (mask_rows == 0).all() and len(mask_rows) == 4 and len(at) == len(factor) == len(shift) == 2
        assert given == "processed" and rows.tolist() == [0, 1, 2, 3]
    else:
        assert given is values and rows.tolist() == [1, 2, 0, 0] and not processed
    if states[1].wanted_logprobs is None:
        assert not computed and found[1].logprobs is None
    else:
        [(tensor, rows, tokens, wanted)] = computed  # of the model's own logits
        assert tensor is values and rows.tolist() == [1, 2, 0, 0] and tokens.values.tolist() == [2, 5, 0, 0]
        assert wanted.tolist() == [0] * 4 and found[0].logprobs is None
        assert found[1].logprobs is not None and found[1].logprobs.logprob == 1 and found[1].logprobs.rank == 2


def test_as_many_logprobs_as_tokens_and_as_packages_compute() -> None:
    from untorch.llm import sampler
    from untorch.ops.sampling.operator import MOST_LOGPROBS

    assert sampler._MOST_LOGPROBS == MOST_LOGPROBS
    logits, _, _ = on_gpu([2, 0, 0, 0])
    arrays = [Array(np.zeros(4)), Array(np.ones(4, int)), Array(np.zeros((4, 20))), Array(np.zeros((4, 20), int))]
    logits._methods = DeviceMethods(6, logits._methods.choose, print, lambda *args: arrays)
    [found] = Sampler(6).sample(logits, [state(temperature=0, logprobs=9)], [1])
    assert found.logprobs is not None and len(found.logprobs.top) == 6


def test_more_logprobs_than_a_package_computes_are_the_hosts() -> None:
    logits, values, calls = on_gpu([0])
    logits._methods = DeviceMethods(6, logits._methods.choose, print, print)
    found = Sampler(6).sample(logits, [state(temperature=0, logprobs=21)], [1])
    assert found[0].token == 1 and not calls and values.copies == 1
    assert found[0].logprobs is not None and len(found[0].logprobs.top) == 6
