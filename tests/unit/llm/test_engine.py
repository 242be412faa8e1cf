"""The engine on a model whose pages are checked: batching, sharing, ends, faults, threads and asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import VOCABULARY, FakeRunner, StatefulRunner, TextRunner, greedy, next_logits
from untorch import ArgumentTypeError, ClosedError, InvalidArgumentError, ModelError, OutOfMemoryError
from untorch.llm import Chunk, Engine, SamplingParams
from untorch.llm.blocks import BlockGroup
from untorch.llm.logits import Logits
from untorch.llm.scheduler import Plan

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def engine(runner: FakeRunner | None = None, **options: Any) -> Engine:
    given = {"max_batch_tokens": 16, "max_sequences": 8, "text": False, **options}
    return Engine(runner or FakeRunner(), **given)


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 40, 20)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("gpu", [False, True])
def test_continuous_batching_is_invisible(prompts: list[list[int]], gpu: bool) -> None:
    runner = FakeRunner(blocks=200, gpu=gpu)
    with engine(runner) as made:
        results = made.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == [greedy(p, 10) for p in prompts]
        assert {r.finish_reason for r in results} == {"length"}
        assert max(len(plan) for plan in runner.plans) == 8
        assert max(sum(count for _, count in plan) for plan in runner.plans) == 16
        assert made.generate(prompts[0], GREEDY).token_ids == greedy(prompts[0], 10)
        stats = made.stats()
    assert (stats.requests, stats.finished, stats.running, stats.waiting) == (21, 21, 0, 0)
    assert stats.blocks_free == stats.blocks == 200
    assert stats.generated_tokens == 210
    assert runner.closed


def test_prompts_of_a_list_begin_together() -> None:
    runner = FakeRunner()
    with engine(runner) as made:
        results = made.generate([[1, 2], "text", [3], [4, 5]], SamplingParams(temperature=0, max_tokens=1))
    assert [r.error is None for r in results] == [True, False, True, True]
    assert [sorted(count for _, count in plan) for plan in runner.plans] == [[1, 2, 2]]


def test_a_step_is_enqueued_before_the_tokens_of_the_last_one_are_here() -> None:
    runner = FakeRunner(gpu=True)
    with engine(runner) as made:
        results = made.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=5))
        assert [r.token_ids for r in results] == [greedy([1, 2, 3], 5), greedy([4, 5], 5)]
        # Each step runs before the last one is waited for.
        last = max(step for _, step in runner.events)
        assert runner.events[-5:] == [
            ("run", last - 1), ("wait", last - 2), ("run", last), ("wait", last - 1), ("wait", last),
        ]  # fmt: skip
        assert not runner.fetched


def test_a_package_without_methods_that_process_logits_waits_for_the_host() -> None:
    runner = FakeRunner(gpu=True, processes=False)
    with engine(runner) as made:
        result = made.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=3, logprobs=0))
        assert [what for what, _ in runner.events] == ["run"] * 3 and set(runner.fetched) == {0, 1, 2}
        assert result.token_ids == greedy([1, 2, 3], 3)


PROCESSED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 3},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "seed": 3, "top_p": 0.9},
    {"logit_bias": {7: 4.0, 9: -100.0}, "seed": 4, "logprobs": 0},
    {"temperature": 0},
    {"seed": 5, "min_tokens": 6, "stop_token_ids": list(range(0, 64, 2))},
    {"seed": 6, "n": 2, "best_of": 3, "top_k": 5},
]


def test_penalties_and_logprobs_on_the_device_are_those_of_the_host() -> None:
    prompts = [[1, 2, 3 + i] for i in range(len(PROCESSED))]
    params = [SamplingParams(max_tokens=12, **fields) for fields in PROCESSED]
    found = []
    for gpu in (False, True):
        runner = FakeRunner(gpu=gpu)
        with engine(runner) as made:
            results = [handle.result() for handle in [made.submit(*one) for one in zip(prompts, params, strict=True)]]
            alone = made.generate(prompts[0], params[0])
            assert alone.token_ids == results[0].token_ids
            stats = made.stats()
            assert stats.blocks_free == stats.blocks
        found.append([[(one.token_ids, one.logprobs) for one in result.completions] for result in results])
        assert not runner.fetched
    assert found[0] == found[1]


def test_the_step_behind_is_enqueued_before_logits_are_processed() -> None:
    """Of the tokens that are chosen now it needs the ids alone, which are on the device."""
    runner = FakeRunner(gpu=True)
    with engine(runner) as made:
        made.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=5, frequency_penalty=1.0))
        last = max(step for _, step in runner.events)
        assert runner.events[-5:] == [
            ("run", last - 1), ("wait", last - 2), ("run", last), ("wait", last - 1), ("wait", last),
        ]  # fmt: skip


def test_a_batch_is_plain_once_min_tokens_are_there() -> None:
    runner = FakeRunner(gpu=True)
    with engine(runner) as made:
        plain: list[bool] = []
        choose = made._core.sampler.choose
        made._core.sampler.choose = lambda *given: (plain.append(False), choose(*given))[1]  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, stop_token_ids=[63])
        expected = next_logits([1, 2, 3])
        result = made.generate([1, 2, 3], params)
        assert len(plain) == 5 and result.token_ids[0] == int(expected[:63].argmax())


def test_consumers_are_woken_while_the_device_computes() -> None:
    """Not while the next step is prepared: they would share the interpreter with it."""
    runner = FakeRunner(gpu=True)
    with engine(runner) as made:
        woken: list[int] = []
        now = made._core._wake.now
        made._core._wake.now = lambda: (woken.append(len(runner.events)), now())[1]  # type: ignore[method-assign]
        chunks = list(made.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=6)))
        assert [token for chunk in chunks for token in chunk.token_ids] == greedy([1, 2, 3], 6)
        # Each time a step was the last event, and the wait came next; the end is given out when nothing is left to run.
        assert {runner.events[count - 1][0] for count in woken if 0 < count < len(runner.events) - 1} == {"run"}
        assert woken.count(len(runner.events)) >= 1


@pytest.mark.parametrize("gpu", [False, True])
def test_chunks_are_made_where_they_are_wanted(gpu: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    with engine(FakeRunner(gpu=gpu)) as made:
        requests: list[Any] = []
        add = made._core.add
        made._core.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
        made.generate([[1, 2, 3]], params)
        handle = made.submit([1, 2, 3], params)
        handle.result()
        assert [len(request.handle._chunks) for request in requests] == [1, 6]
        assert [chunk.token_ids for chunk in handle] == [[token] for token in greedy([1, 2, 3], 6)]


def test_ends_that_are_seen_a_step_late() -> None:
    """Stop tokens and stop strings: the token behind them was computed, and nobody gets it."""
    prompts = [[i, i + 1] for i in range(8)]
    whole = [greedy(prompt, 12) for prompt in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(tokens[i],)) for i, tokens in enumerate(whole)
    ]
    expected = [tokens[: tokens.index(tokens[i]) + 1] for i, tokens in enumerate(whole)]
    runner = FakeRunner(blocks=40, gpu=True)
    with engine(runner, max_sequences=3) as made:
        for _ in range(2):  # the second time with prefixes that were computed meanwhile
            results = made.generate(prompts, params)
            assert [r.token_ids for r in results] == expected
            assert {r.finish_reason for r in results} == {"stop"}
        stats = made.stats()
    assert stats.blocks_free == 40
    assert stats.generated_tokens == 2 * sum(map(len, expected))


def test_the_models_length_is_seen_in_time() -> None:
    runner = FakeRunner(blocks=20, gpu=True, max_positions=12)
    with engine(runner) as made:
        result = made.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=None))
        assert result.finish_reason == "length" and result.token_ids == greedy([1, 2, 3], 9)
    assert max(start + count for plan in runner.plans for start, count in plan) == 11


@pytest.mark.slow
def test_cancelling_while_steps_are_ahead() -> None:
    runner = FakeRunner(blocks=40, gpu=True)
    with engine(runner) as made:
        for _ in range(20):
            handles = [made.submit([i, 2, 3], SamplingParams(temperature=0, max_tokens=100)) for i in range(4)]
            stream = iter(handles[0])
            next(stream)
            handles[1].cancel()
            handles[0].cancel()
            kept = made.generate([9, 9], GREEDY)
            assert kept.token_ids == greedy([9, 9], 10)
            for handle in handles:
                handle.cancel()
                handle.wait()
        assert made.stats().blocks_free == 40


def test_a_fault_in_a_step_that_is_ahead() -> None:
    def hook(plan: Any) -> None:
        if plan.items[0].start == 6:
            raise RuntimeError("lost")

    with engine(FakeRunner(gpu=True, hook=hook)) as made:
        with pytest.raises(ModelError, match="the step failed: RuntimeError: lost"):
            made.generate([1, 2, 3], GREEDY)
        assert made.generate([1], SamplingParams(temperature=0, max_tokens=4)).token_ids == greedy([1], 4)
        assert made.stats().running == 0


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_is_invisible(prompts: list[list[int]], prefix_cache: bool, gpu: bool) -> None:
    with engine(FakeRunner(blocks=14, gpu=gpu), prefix_cache=prefix_cache) as made:
        results = made.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == [greedy(p, 10) for p in prompts]
        assert made.stats().preemptions > 0
        assert made.stats().blocks_free == 14


GROUPS = (BlockGroup(12), BlockGroup(4, window=7), BlockGroup(4, chunk=6))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("blocks", [20, 900])
def test_groups_of_layers(prompts: list[list[int]], blocks: int, gpu: bool) -> None:
    """Each group's pages have the tokens that it sees: with preemption, samples, and prefixes of other requests."""
    with engine(FakeRunner(blocks=blocks, gpu=gpu, groups=GROUPS)) as made:
        for _ in range(2):
            results = made.generate(prompts, GREEDY)
            assert [r.error for r in results] == [None] * len(prompts)
            assert [r.token_ids for r in results] == [greedy(p, 10) for p in prompts]
        stats = made.stats()
        assert stats.blocks_free == blocks and stats.cached_tokens % 12 == 0
        assert (stats.preemptions > 0, stats.cached_tokens > 0) == (blocks == 20, blocks > 20)
        for prompt in prompts[:6]:
            output = made.generate(prompt, SamplingParams(n=4, temperature=0, max_tokens=12))
            assert [item.token_ids for item in output.completions] == [greedy(prompt, 12)] * 4
        assert made.stats().blocks_free == blocks


def test_the_longest_prompt_of_groups() -> None:
    with engine(FakeRunner(blocks=16, groups=GROUPS[:2])) as made:
        assert made.max_prompt_tokens == 13 * 12
        prompt = [i % 50 for i in range(150)]
        assert made.generate(prompt, GREEDY).token_ids == greedy(prompt, 7)  # the pages hold 156


def test_a_known_prefix_is_counted() -> None:
    with engine() as made:
        prompt = list(range(20))
        assert made.generate(prompt, GREEDY).usage.cached_tokens == 0
        again = made.generate([*prompt, 3], GREEDY)
        assert again.usage.cached_tokens == 20
        assert again.usage.prompt_tokens == 21
        assert again.token_ids == greedy([*prompt, 3], 10)
        assert made.stats().cached_tokens == 20


def test_the_longest_prompt() -> None:
    for blocks, window, most in ((64, 0, 199), (5, 0, 20), (5, 8, 199)):
        with engine(FakeRunner(blocks=blocks, window=window)) as made:
            assert made.max_prompt_tokens == most
            with pytest.raises(InvalidArgumentError, match="prompt: expected"):
                made.submit([1] * (most + 1))


def test_the_chat_template_as_text() -> None:
    with engine(TextRunner("x", "{{ messages }}"), text=True) as made:
        assert made.chat_template == "{{ messages }}"
    with engine() as made:
        assert made.chat_template is None


def test_samples_of_one_prompt() -> None:
    prompt = list(range(9))
    params = SamplingParams(n=4, seed=1, max_tokens=12, temperature=2.0)
    with engine() as made:
        output = made.generate(prompt, params)
        ids = [item.token_ids for item in output.completions]
        assert [item.index for item in output.completions] == [0, 1, 2, 3]
        assert len({tuple(one) for one in ids}) == 4
        assert output.usage.completion_tokens == 48
        others = made.generate([prompt, [5], prompt], [params, GREEDY, params])
        assert [item.token_ids for item in others[0].completions] == ids
        assert [item.token_ids for item in others[2].completions] == ids
        same = made.generate(prompt, SamplingParams(n=3, temperature=0, max_tokens=12))
        assert [item.token_ids for item in same.completions] == [greedy(prompt, 12)] * 3
        best = made.generate(prompt, SamplingParams(n=2, best_of=4, seed=1, max_tokens=12, temperature=2.0))
        assert all(item.token_ids in ids and item.logprobs is None for item in best.completions)
        logged = made.generate(prompt, SamplingParams(n=4, seed=1, max_tokens=12, temperature=2.0, logprobs=0))
        means = [np.mean([t.logprob for t in item.logprobs or ()]) for item in logged.completions]
        assert [item.index for item in best.completions] == np.argsort(means)[::-1][:2].tolist()


@pytest.mark.parametrize("gpu", [False, True])
def test_states_follow_their_sequences(prompts: list[list[int]], gpu: bool) -> None:
    """Preemption, samples and sequences that end at once, with a state beside the pages."""
    with engine(StatefulRunner(blocks=14, gpu=gpu)) as made:
        results = made.generate(prompts, GREEDY)
        assert [r.error for r in results] == [None] * len(prompts)
        assert [r.token_ids for r in results] == [greedy(p, 10) for p in prompts]
        assert made.stats().preemptions > 0
        assert made.stats().cached_tokens == 0
        again = made.generate(prompts[0], GREEDY)
        assert (again.token_ids, again.usage.cached_tokens) == (greedy(prompts[0], 10), 0)
    with engine(StatefulRunner(blocks=24, gpu=gpu)) as made:
        samples = SamplingParams(n=4, temperature=0, max_tokens=9)
        at_once = SamplingParams(n=3, temperature=0, max_tokens=1)
        given = [(prompt, samples if i % 2 else at_once) for i, prompt in enumerate(prompts[:10])]
        outputs = made.generate([prompt for prompt, _ in given], [params for _, params in given])
        for (prompt, params), output in zip(given, outputs, strict=True):
            assert output.error is None
            expected = greedy(prompt, params.max_tokens or 0)
            assert [item.token_ids for item in output.completions] == [expected] * params.n
        assert made._core.scheduler.slots is not None
        assert made._core.scheduler.slots.free == 8


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("blocks", "snapshots"), [(14, 2), (200, 60)])
def test_states_of_known_prefixes(prompts: list[list[int]], blocks: int, snapshots: int, gpu: bool) -> None:
    """Snapshots are restored: what is said is the same, and most of a prompt is computed once."""
    given = [prompts[2] + prompt for prompt in prompts]
    given = [prompt[:45] for prompt in given]
    with engine(StatefulRunner(blocks=blocks, gpu=gpu, snapshots=snapshots)) as made:
        for _ in range(2):
            results = made.generate(given, GREEDY)
            assert [r.error for r in results] == [None] * len(given)
            assert [r.token_ids for r in results] == [greedy(p, 10) for p in given]
        stats = made.stats()
        assert 0 < stats.state_snapshots <= snapshots and stats.prefix_hits > 0 < stats.cached_tokens
        if blocks == 200:
            assert all(r.usage.cached_tokens == (r.usage.prompt_tokens - 1) // 4 * 4 for r in results)
        samples = SamplingParams(n=3, temperature=0, max_tokens=9)
        for prompt in given[:4]:
            assert [one.token_ids for one in made.generate(prompt, samples).completions] == [greedy(prompt, 9)] * 3
    with engine(StatefulRunner(snapshots=4), prefix_cache=False) as made:
        for _ in range(2):
            assert made.generate(given[0], GREEDY).usage.cached_tokens == 0
        assert made.stats().state_snapshots == 0


def test_snapshots_of_a_step_that_failed() -> None:
    faults = [False] * 3 + [True]

    def hook(plan: Plan) -> None:
        if faults and faults.pop(0):
            raise RuntimeError("the step")

    runner = StatefulRunner(snapshots=4, hook=hook)
    with engine(runner) as made:
        prompt = list(range(10))
        made.generate(prompt, SamplingParams(max_tokens=2, temperature=0))
        assert made.stats().state_snapshots == 1
        with pytest.raises(ModelError):
            made.generate([5], GREEDY)
        assert made.stats().state_snapshots == 0
        again = made.generate(prompt, GREEDY)
        assert (again.token_ids, again.usage.cached_tokens) == (greedy(prompt, 10), 0)


def test_samples_when_blocks_run_out() -> None:
    with engine(FakeRunner(blocks=8)) as made:
        output = made.generate(list(range(6)), SamplingParams(n=6, temperature=0, max_tokens=9))
        assert [item.token_ids for item in output.completions] == [greedy(list(range(6)), 9)] * 6
        assert made.stats().preemptions > 0


def test_ends() -> None:
    prompt = [1, 2, 3]
    free = greedy(prompt, 30)
    runner = FakeRunner(stop_ids=(free[4],))
    with engine(runner) as made:

        def run(**fields: Any) -> tuple[list[int], str, Any]:
            output = made.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 20, **fields}))
            return output.token_ids, output.finish_reason, output.completions[0].stop_reason

        first = free.index(free[4]) + 1
        assert run() == (free[:first], "stop", None)
        assert run(ignore_eos=True) == (free[:20], "length", None)
        assert run(max_tokens=2) == (free[:2], "length", None)
        assert run(stop_token_ids=[free[1]])[1:] == ("stop", free[1])
        tokens, reason, _ = run(min_tokens=20)
        assert (len(tokens), reason) == (20, "length")
        assert free[4] not in tokens


def test_the_models_and_the_caches_length() -> None:
    prompt = [1, 2, 3]
    everything = SamplingParams(temperature=0, max_tokens=None)
    with engine(FakeRunner(max_positions=30)) as made:
        output = made.generate(prompt, everything)
        assert (output.token_ids, output.finish_reason) == (greedy(prompt, 27), "length")
    with engine(FakeRunner(blocks=5)) as made:
        results = made.generate([prompt, [4]], everything)
        assert [r.finish_reason for r in results] == ["length", "length"]
        assert results[0].token_ids == greedy(prompt, 18)  # the last token needs no page
        assert results[1].token_ids == greedy([4], 20)
        assert made.generate(prompt, GREEDY).token_ids == greedy(prompt, 10)


def test_logprobs() -> None:
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1] * 3
    with engine() as made:
        made.generate(prompt, GREEDY)
        output = made.generate(
            prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
        )  # fmt: skip
    assert output.usage.cached_tokens == 0
    assert output.logprobs is not None
    assert [item.token for item in output.logprobs] == greedy(prompt, 3)
    assert all(item.rank == 1 and len(item.top) == 2 for item in output.logprobs)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [item.token for item in output.prompt_logprobs[1:] if item is not None] == prompt[1:]
    assert [item.top[0][0] for item in output.prompt_logprobs[1:] if item is not None] == [
        greedy(prompt[:i], 1)[0] for i in range(1, len(prompt))
    ]


def test_forms_of_prompts() -> None:
    with engine() as made:
        expected = greedy([1, 2, 3], 10)
        for prompt in ((1, 2, 3), np.array([1, 2, 3]), [np.int64(1), np.int32(2), 3]):
            assert made.generate(prompt, GREEDY).token_ids == expected
        many = made.generate([np.array([1, 2, 3]), (4,)], [GREEDY, SamplingParams(temperature=0, max_tokens=2)])
        assert [r.token_ids for r in many] == [expected, greedy([4], 2)]
        assert made.generate([]) == made.generate((), [GREEDY]) == []
        assert made.submit([1], GREEDY, priority=np.int64(1), timeout=np.float32(60)).result().token_ids
        assert made.generate([1], SamplingParams(temperature=3e38, max_tokens=4)).finish_reason == "length"
        assert made.generate([1], SamplingParams(repetition_penalty=1e-30, max_tokens=4)).finish_reason == "length"


def test_an_interrupt_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    with engine(FakeRunner(hook=lambda plan: time.sleep(0.001))) as made:
        endless = SamplingParams(temperature=0, max_tokens=190)
        for prompts in ([1], [[1], [2]]):
            with monkeypatch.context() as patch:
                patch.setattr("untorch.llm.handle.Generation.wait", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    made.generate(prompts, endless)
        made.generate([3], GREEDY)
        assert made.stats().running == 0


def test_one_wrong_request_of_many() -> None:
    with engine() as made:
        results = made.generate([[1, 2], [3, VOCABULARY], [4]], GREEDY)
        assert results[0].token_ids == greedy([1, 2], 10)
        assert results[2].token_ids == greedy([4], 10)
        assert results[1].finish_reason == "error"
        assert str(results[1].error) == f"prompt: token 1: expected an id from 0 to 63, got {VOCABULARY}"
        with pytest.raises(InvalidArgumentError, match="token 0: expected an id"):
            made.generate([-1], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ([], {}, "prompt: expected at least one token, got none"),
        ("text", {}, "prompt: expected token ids, as there is no tokenizer, got text"),
        ([1.5], {}, "prompt: expected text or a list of token ids, got [1.5]"),
        ([1] * 200, {}, "prompt: expected less than 200 tokens, the model's length, got 200"),
        ([1] * 90, {}, "prompt: expected at most 80 tokens, which is what the pages hold, got 90: give the engine more "
                       "kv_memory"),
        ([1], {"stop": "x"}, "SamplingParams: stop: there is no tokenizer, so there is no text to search"),
        ([1], {"stop_token_ids": [64]}, "SamplingParams: stop_token_ids: expected ids from 0 to 63, got 64"),
        ([1], {"logit_bias": {99: 1}}, "SamplingParams: logit_bias: expected ids from 0 to 63, got 99"),
        ([1], {"n": 9}, "SamplingParams: n: expected at most the engine's max_sequences (8), got 9"),
        ([1], {"regex": "a"}, "SamplingParams: regex: the package has no tokenizer, which this needs"),
    ],
)  # fmt: skip
def test_refusals(prompt: Any, fields: dict[str, Any], text: str) -> None:
    with engine(FakeRunner(blocks=20)) as made, pytest.raises(InvalidArgumentError) as caught:
        made.submit(prompt, SamplingParams(**fields))
    assert str(caught.value) == text


def test_wrong_arguments() -> None:
    for options, text in [
        ({"max_batch_tokens": 0}, "Engine: max_batch_tokens: expected a positive integer, got 0"),
        ({"max_sequences": 17}, "Engine: max_batch_tokens: expected at least max_sequences (17), as each sequence "
                                "decodes one token a step, got 16"),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgumentError) as caught:
            engine(**options)
        assert str(caught.value) == text
    with engine() as made:
        with pytest.raises(
            ArgumentTypeError, match="prompts: expected text, token ids or a list of prompts, got NoneType"
        ):
            made.generate(None)  # type: ignore[call-overload]
        with pytest.raises(ArgumentTypeError, match="params: expected SamplingParams, got dict"):
            made.submit([1], {})  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="timeout: expected seconds above 0, got 0"):
            made.submit([1], GREEDY, timeout=0)
        with pytest.raises(InvalidArgumentError, match="params: expected 2, one a prompt, got 1"):
            made.generate([[1], [2]], [GREEDY])
        with pytest.raises(InvalidArgumentError, match="the package has no chat template"):
            made.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("error", [RuntimeError("it broke"), OutOfMemoryError("no memory")])
def test_a_fault_fails_the_requests_of_its_step(error: Exception) -> None:
    def hook(plan: Any) -> None:
        if any(item.sequence.tokens[0] == 13 for item in plan.items):
            raise error

    runner = FakeRunner(hook=hook)
    with engine(runner, max_sequences=2) as made:
        with pytest.raises(OutOfMemoryError if isinstance(error, OutOfMemoryError) else ModelError) as caught:
            made.generate([13, 4], GREEDY)
        assert str(error) in str(caught.value)
        good = made.generate([14], GREEDY)
        assert good.token_ids == greedy([14], 10)
        assert made.stats().blocks_free == 64
        assert made.stats().finished == 2


def test_logits_that_are_not_numbers() -> None:
    class Broken(FakeRunner):
        def run(self, plan: Any, rows: Any, tokens: Any = None) -> Logits:
            logits = super().run(plan, rows).numpy()
            for at, item in enumerate(plan.items):
                if item.sequence.tokens[0] == 13 and at < len(logits):
                    logits[at] = np.nan
            return Logits(logits)

    with engine(Broken()) as made:
        results = made.generate([[13, 1], [14, 1]], GREEDY)
        assert isinstance(results[0].error, ModelError)
        assert results[1].token_ids == greedy([14, 1], 10)


def test_cancelling() -> None:
    runner = FakeRunner(hook=lambda plan: time.sleep(0.005))
    with engine(runner) as made:
        endless = SamplingParams(temperature=0, max_tokens=150)
        runner.gate.clear()
        handle, other = made.submit([1, 2], endless), made.submit([3], GREEDY)
        runner.gate.set()
        chunks = iter(handle)
        first = [next(chunks) for _ in range(3)]
        handle.cancel()
        output = handle.result(5)
        assert output.finish_reason == "cancelled"
        assert output.token_ids == greedy([1, 2], len(output.token_ids))
        assert [token for chunk in first for token in chunk.token_ids] == output.token_ids[:3]
        assert other.result(5).token_ids == greedy([3], 10)
        handle.cancel()
        assert made.stats().blocks_free == 64
        waiting = made.submit([1], endless)
        waiting.cancel()
        assert waiting.result(5).finish_reason == "cancelled"


def test_deadlines_and_priorities() -> None:
    runner = FakeRunner(hook=lambda plan: time.sleep(0.005))
    with engine(runner, max_sequences=1) as made:
        slow = made.submit([1], SamplingParams(temperature=0, max_tokens=150), timeout=0.3)
        late, soon = made.submit([2], GREEDY, priority=1), made.submit([3], GREEDY, priority=0)
        output = slow.result(5)
        assert output.finish_reason == "timeout"
        assert 0 < len(output.token_ids) < 150
        soon.result(5)
        assert not late.done
        assert late.result(5).token_ids == greedy([2], 10)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_higher_priority_does_not_wait(gpu: bool) -> None:
    runner = FakeRunner(hook=lambda plan: time.sleep(0.005), gpu=gpu)
    with engine(runner, max_sequences=1) as made:
        low = made.submit([1], SamplingParams(temperature=0, max_tokens=60), priority=1)
        next(iter(low))
        high = made.submit([3], GREEDY)
        assert high.result(5).token_ids == greedy([3], 10)
        assert not low.done
        assert low.result(5).token_ids == greedy([1], 60)
        assert made.stats().preemptions == 1


def test_closing_cancels() -> None:
    made = engine(FakeRunner(hook=lambda plan: time.sleep(0.005)))
    handle = made.submit([1], SamplingParams(temperature=0, max_tokens=190))
    next(iter(handle))
    made.close()
    assert handle.result(0).finish_reason == "cancelled"
    with pytest.raises(ClosedError, match="the engine is closed"):
        made.submit([1], GREEDY)
    made.close()


def test_result_with_a_timeout() -> None:
    runner = FakeRunner()
    with engine(runner) as made:
        runner.gate.clear()
        handle = made.submit([1], GREEDY)
        with pytest.raises(TimeoutError, match=r"not finished after 0\.01 seconds"):
            handle.result(0.01)
        runner.gate.set()
        assert handle.result(5).finish_reason == "length"


def test_64_streams() -> None:
    async def one(made: Engine, number: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in made.stream([number, 5, 6], GREEDY):
            tokens += chunk.token_ids
        return tokens

    async def run() -> list[list[int]]:
        with engine(FakeRunner(blocks=120), max_sequences=32, max_batch_tokens=32) as made:
            return await asyncio.gather(*(one(made, i % VOCABULARY) for i in range(64)))

    assert asyncio.run(run()) == [greedy([i % VOCABULARY, 5, 6], 10) for i in range(64)]


def test_leaving_a_stream_cancels() -> None:
    async def run() -> None:
        with engine(FakeRunner(hook=lambda plan: time.sleep(0.005))) as made:
            stream = made.stream([1], SamplingParams(temperature=0, max_tokens=190))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            for _ in range(500):
                if made.stats().finished:
                    break
                await asyncio.sleep(0.005)
            assert made.stats().finished == 1
            assert made.stats().generated_tokens < 190
            with pytest.raises(InvalidArgumentError, match="best_of decides at the end"):
                async for _ in made.stream([1], SamplingParams(best_of=2)):
                    pass

    asyncio.run(run())


def test_waiting_for_a_handle_with_a_timeout_cancels() -> None:
    async def run() -> None:
        with engine(FakeRunner(hook=lambda plan: time.sleep(0.005))) as made:
            endless = SamplingParams(temperature=0, max_tokens=190)
            kept = made.submit([2], endless)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(kept), 0.02)
            assert not kept.done
            kept.cancel()
            handle = made.submit([1], endless)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(handle, 0.02)
            assert (await handle).finish_reason == "cancelled"

    asyncio.run(run())


def test_a_stream_raises_what_failed() -> None:
    def hook(plan: Any) -> None:
        raise RuntimeError("it broke")

    async def run() -> None:
        with engine(FakeRunner(hook=hook)) as made:
            with pytest.raises(ModelError, match="the step failed: RuntimeError: it broke"):
                async for _ in made.stream([1], GREEDY):
                    pass
            with pytest.raises(ModelError, match="it broke"):
                list(made.submit([1], GREEDY))

    asyncio.run(run())


def test_text() -> None:
    text = "Grüße, 世界! 🌍 and more"
    params = SamplingParams(temperature=0, max_tokens=100)
    with engine(TextRunner(text), text=True) as made:
        chunks = list(made.submit("hello", params))
        assert "".join(chunk.text for chunk in chunks) == text
        assert not any("\ufffd" in chunk.text for chunk in chunks)
        assert chunks[-1].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(text.encode()) + 1
        output = made.generate("hello", params)
        assert (output.text, output.usage.prompt_tokens) == (text, 5)

        def stopped(**fields: Any) -> tuple[str, Any, list[Chunk]]:
            handle = made.submit("hello", SamplingParams(temperature=0, max_tokens=100, **fields))
            found = list(handle)
            return "".join(chunk.text for chunk in found), handle.result().completions[0].stop_reason, found

        assert stopped(stop=["界!"])[:2] == ("Grüße, 世", "界!")
        assert stopped(stop=["界!"], include_stop_str_in_output=True)[0] == "Grüße, 世界!"
        words, reason, found = stopped(stop="more and")
        assert (words, reason) == (text, None)
        assert [chunk.text for chunk in found[-5:]] == ["", "", "", "", "more"]
        assert stopped(stop="r", min_tokens=5)[0] == "Grüße, 世界! 🌍 and mo"
        results = made.generate(["ok", "\ud800"], params)
        assert results[0].text == text
        assert str(results[1].error).startswith("prompt: expected Unicode text, got a lone surrogate, '\\ud800', at 0")
        cut = made.generate("hello", SamplingParams(temperature=0, max_tokens=3))
        assert cut.text == "Gr\ufffd"


def test_it_is_imported_by_name() -> None:
    code = "import untorch; untorch.llm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("AttributeError: untorch.llm is not imported with untorch: import untorch.llm\n")


def test_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import untorch.llm; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not any(name in done.stdout for name in ("'tokenizers'", "'llguidance'", "'jinja2'", "'transformers'"))


def test_closing_lets_requests_end() -> None:
    runner = FakeRunner()
    runner.gate.clear()
    made = engine(runner)
    running = made.submit([1, 2, 3], SamplingParams(max_tokens=6, temperature=0))
    closing = threading.Thread(target=made.close, args=(30,))
    closing.start()
    while True:
        try:
            made.submit([1], SamplingParams(max_tokens=1)).cancel()
        except ClosedError:
            break
    runner.gate.set()
    closing.join(30)
    assert running.result(0).token_ids == greedy([1, 2, 3], 6)
    assert runner.closed


def test_closing_has_an_end() -> None:
    runner = FakeRunner(hook=lambda plan: time.sleep(0.02))
    made = engine(runner)
    running = made.submit([1], SamplingParams(max_tokens=190, temperature=0))
    given_up = made.submit([1], SamplingParams(max_tokens=190, temperature=0))
    threading.Timer(0.1, given_up.cancel).start()
    made.close(0.5)
    assert running.result(0).finish_reason == given_up.result(0).finish_reason == "cancelled"
    assert len(given_up.result(0).token_ids) < len(running.result(0).token_ids) < 190
