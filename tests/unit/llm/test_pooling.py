"""Embeddings and scores by the engine on a model whose pages are checked: poolings, batching, ends, faults, asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import VOCABULARY, FakeRunner, byte_tokenizer, next_logits
from untorch import ArgumentTypeError, ClosedError, InvalidArgumentError, ModelError
from untorch.llm import Engine, PoolingOutput, Prompt
from untorch.llm.logits import Logits
from untorch.llm.pooling import PooledRequest, Pooler, Pooling
from untorch.llm.scheduler import Scheduled
from untorch.llm.sequence import Sequence
from untorch.llm.settings import POOLINGS

EMBED = {"task": "embed", "width": VOCABULARY}


def engine(runner: FakeRunner | None = None, **options: Any) -> Engine:
    given = {"max_batch_tokens": 16, "max_sequences": 8, "text": False, **options}
    return Engine(runner or FakeRunner(**EMBED), **given)


def expected(prompt: list[int], pooling: str) -> np.ndarray:
    rows = np.array([next_logits(prompt[: i + 1]) for i in range(len(prompt))], np.float64)
    weights = np.arange(1, len(rows) + 1)[:, None]
    found: np.ndarray = {
        "last": rows[-1], "cls": rows[0], "mean": rows.mean(0), "max": rows.max(0),
        "weighted_mean": (rows * weights).sum(0) / weights.sum(), "mean_sqrt_len": rows.sum(0) / len(rows) ** 0.5,
    }[pooling]  # fmt: skip
    return found


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 60, 12)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings(prompts: list[list[int]], pooling: str) -> None:
    runner = FakeRunner(blocks=200, **EMBED, pooling=pooling)
    with engine(runner) as made:
        found = made.embed(prompts)
        assert found.dtype == np.float32
        assert found.shape == (12, VOCABULARY)
        np.testing.assert_allclose(found, [expected(prompt, pooling) for prompt in prompts], rtol=1e-5, atol=1e-5)
        assert max(sum(count for _, count in plan) for plan in runner.plans) == 16  # in chunks
        assert max(len(plan) for plan in runner.plans) > 1
        # Equal beginnings are computed once only where the rows of all tokens are not wanted.
        again = made.submit_pooled(prompts[0]).result()
        assert again.usage.cached_tokens == ((len(prompts[0]) - 1) // 4 * 4 if pooling == "last" else 0)
        assert (again.finish_reason, again.error) == ("stop", None)
        assert again.data is not None
        np.testing.assert_array_equal(again.data, found[0])
        stats = made.stats()
        assert stats.blocks_free == stats.blocks
        assert (stats.requests, stats.finished, stats.generated_tokens) == (13, 13, 0)
        assert stats.prompt_tokens == sum(map(len, prompts)) + len(prompts[0])


def test_forms_of_prompts() -> None:
    with engine() as made:
        for single in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), Prompt([1, 2, 3]), [[1, 2, 3]], [Prompt([1, 2, 3])]):
            np.testing.assert_allclose(made.embed(single), [expected([1, 2, 3], "last")], rtol=1e-5)
        assert made.embed([]).shape == (0, VOCABULARY)
        assert made.embed(np.array([[1, 2], [3, 4]])).shape == (2, VOCABULARY)  # type: ignore[arg-type]


def test_normalize_and_dense(prompts: list[list[int]]) -> None:
    weight = np.random.default_rng(1).standard_normal((VOCABULARY, 5)).astype(np.float32)

    class Dense(FakeRunner):
        def dense(self, pooled: Any) -> Any:
            return np.tanh(pooled @ weight)

    with engine(Dense(task="embed", width=5, pooling="mean", normalize=True, dense="dense")) as made:
        found = made.embed(prompts)
    rows = np.tanh(np.array([expected(prompt, "mean") for prompt in prompts]) @ weight)
    np.testing.assert_allclose(found, rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_a_sequence_that_begins_again() -> None:
    pooler = Pooler("mean")
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    pooler.add(rows[:3], 0)
    pooler.add(rows[:1], 0)  # it was preempted
    pooler.add(rows[1:], 1)
    np.testing.assert_array_equal(pooler.result(4), rows.mean(0))
    sequence = Sequence([5] * 7)
    for kind, chunk, wanted in [
        ("last", (0, 4), []), ("last", (4, 3), [6]), ("cls", (0, 4), [0]), ("cls", (4, 3), []),
        ("mean", (4, 3), [4, 5, 6]),
    ]:  # fmt: skip
        assert list(Pooler(kind).rows(Scheduled(sequence, *chunk))) == wanted


def test_prompts_of_a_list_begin_together() -> None:
    runner = FakeRunner(**EMBED)
    with engine(runner) as made:
        made.embed([[1, 2], [3], [4, 5]])
    assert [sorted(count for _, count in plan) for plan in runner.plans] == [[1, 2, 2]]


def test_prompts_as_long_as_the_model() -> None:
    with engine(FakeRunner(**EMBED, max_positions=30)) as made:
        assert made.embed([1] * 30).shape == (1, VOCABULARY)
        with pytest.raises(InvalidArgumentError) as caught:
            made.embed([[2], [1] * 31])
        assert str(caught.value) == "embed: prompts[1]: prompt: expected at most 30 tokens, the model's length, got 31"
        made.embed([3])
        assert made.stats().running == made.stats().waiting == 0


def test_too_few_pages_behind_a_window() -> None:
    """Steps have fewer tokens where that is enough."""
    with engine(FakeRunner(blocks=3, window=8, **EMBED), max_batch_tokens=16) as made:
        assert made.embed([1] * 30).shape == (1, VOCABULARY)
        assert made.stats().blocks_free == 3
    with (
        engine(FakeRunner(blocks=2, window=8, **EMBED), max_batch_tokens=16) as made,
        pytest.raises(InvalidArgumentError, match="expected at most 8 tokens, which is what the pages hold, got 30"),
    ):
        made.embed([1] * 30)
    request = PooledRequest(Sequence([1] * 30), "last", None, Pooling(lambda: None))
    request.samples[0].finish_reason = "length"
    assert str(request.output().error) == "prompt: the pages do not hold its 30 tokens: give the engine more kv_memory"


WRONG = [
    ({}, lambda e: e.embed([1]), "embed: the package generates text: call generate"),
    ({}, lambda e: e.classify([1]), "classify: the package generates text: call generate"),
    ({}, lambda e: e.score("a", "b"), "score: the package generates text: call generate"),
    ({}, lambda e: e.submit_pooled([1]), "submit_pooled: the package generates text: call generate"),
    (EMBED, lambda e: e.generate([1]), "generate: the package makes embeddings: call embed"),
    (EMBED, lambda e: e.generate([[1], [2]]), "generate: the package makes embeddings: call embed"),
    (EMBED, lambda e: e.submit([1]), "submit: the package makes embeddings: call embed"),
    (EMBED, lambda e: e.classify([1]), "classify: the package makes embeddings: call embed"),
    ({**EMBED, "task": "classify"}, lambda e: e.embed([1]), "embed: the package makes scores: call classify or score"),
    ({**EMBED, "task": "classify"}, lambda e: e.generate([1]), "generate: the package makes scores: call classify or "
                                                               "score"),
    (EMBED, lambda e: e.embed("text"), "embed: prompts[0]: prompt: expected token ids, as there is no tokenizer, got "
                                       "text"),
    (EMBED, lambda e: e.embed([[1], []]), "embed: prompts[1]: prompt: expected at least one token, got none"),
    (EMBED, lambda e: e.embed(3), "embed: prompts: expected text, token ids or a list of prompts, got int"),
    (EMBED, lambda e: e.embed([1.5]), "embed: prompts[0]: prompt: expected text or a list of token ids, got 1.5"),
    (EMBED, lambda e: e.embed([1], timeout=0), "embed: prompts[0]: submit_pooled: timeout: expected seconds above 0, "
                                               "got 0"),
    (EMBED, lambda e: e.embed([1], prompt_name="q"), "embed: prompt_name: expected one of the package's, no name, as "
                                                     "it has no prompts, got 'q'"),
    ({**EMBED, "task": "classify", "labels": ("a", "b")}, lambda e: e.score("a", "b"),
     "score: expected a model with one label, this one has 2: call classify"),
    ({**EMBED, "task": "classify", "labels": ("a",)}, lambda e: e.score("a", "b"),
     "score: there is no tokenizer: call classify with token ids"),
    ({**EMBED, "task": "classify", "labels": ("a",)}, lambda e: e.score("a", 3),
     "score: expected query as text and documents as texts: call classify for token ids"),
    ({**EMBED, "task": "classify", "labels": ("a",)}, lambda e: e.score([1], ["b"]),
     "score: expected query as text and documents as texts: call classify for token ids"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "call", "text"), WRONG)
def test_wrong_calls(settings: dict[str, Any], call: Any, text: str) -> None:
    with engine(FakeRunner(**settings)) as made, pytest.raises(InvalidArgumentError) as caught:
        call(made)
    assert str(caught.value) == text


class ScoreRunner(FakeRunner):
    """One score: the number of tokens, less 5. hook sees the prompts."""

    def __init__(self, **settings: Any) -> None:
        files = {"tokenizer.json": byte_tokenizer()}
        super().__init__(
            files=files, tokenizer="tokenizer.json", task="classify", width=1, labels=("LABEL_0",),
            **{"vocabulary": 258, **settings},
        )  # fmt: skip
        self.prompts: list[list[int]] = []

    def run(self, plan: Any, rows: Any, *rest: Any) -> Logits:
        super().run(plan, [], *rest)
        done = [item.sequence.tokens for item in plan.items if item.end == len(item.sequence.tokens)]
        self.prompts += done
        return Logits(np.array([[len(tokens) - 5] for tokens in done], np.float32).reshape(-1, 1))


def test_scores() -> None:
    from untorch.llm.tokenizer import Tokenizer

    words = Tokenizer(byte_tokenizer())
    runner = ScoreRunner()
    with engine(runner, text=True) as made:
        np.testing.assert_array_equal(made.classify(["ab", "abcdef"]), [[-3], [1]])
        runner.prompts.clear()
        own = made.score("ab", ["c", "defgh", ""], sigmoid=False)
        assert own.dtype == np.float32
        np.testing.assert_array_equal(own, [-2, 2, -3])
        assert sorted(map(words.decode, runner.prompts)) == ["ab", "abc", "abdefgh"]
        np.testing.assert_allclose(made.score("ab", "defgh"), [1 / (1 + np.exp(-2))], rtol=1e-6)
        runner.prompts.clear()
        made.score("{document}", ["x{query}"], template="Q: {query} {} D: {document}{document}")
        assert words.decode(runner.prompts[0]) == "Q: {document} {} D: x{query}x{query}"
        with pytest.raises(InvalidArgumentError) as caught:
            made.score("a", "b", template="{query}")
        assert str(caught.value) == "score: template: expected {query} and {document} in it, got '{query}'"
        assert made.score("a", []).shape == (0,)
        assert asyncio.run(made.ascore("ab", ["c"], sigmoid=False)) == [-2]
        assert asyncio.run(made.aclassify("abcdef")).tolist() == [[1]]


def test_named_prompts() -> None:
    runner = ScoreRunner(prompts={"query": "Q: ", "document": ""}, default_prompt=None)
    runner.settings = type(runner.settings)(**{**vars(runner.settings), "task": "embed"})
    with engine(runner, text=True) as made:
        assert made.embed("ab")[0] == -3
        assert made.embed("ab", prompt_name="query")[0] == 0
        assert made.embed(["ab", [1, 2]], prompt_name="query").ravel().tolist() == [0, -3]  # ids are left alone
        assert made.embed([1, 2], prompt_name="query")[0] == -3
        assert made.embed("ab", prompt_name="document")[0] == -3
        with pytest.raises(InvalidArgumentError) as caught:
            made.embed("ab", prompt_name="passage")
        assert str(caught.value) == (
            "embed: prompt_name: expected one of the package's, 'query', 'document', got 'passage'"
        )  # fmt: skip
        assert asyncio.run(made.aembed("ab", prompt_name="query"))[0] == 0
    runner = ScoreRunner(prompts={"query": "Q: "}, default_prompt="query")
    runner.settings = type(runner.settings)(**{**vars(runner.settings), "task": "embed"})
    with engine(runner, text=True) as made:
        assert made.embed("ab")[0] == 0


def test_cancelling_deadlines_and_closing() -> None:
    runner = FakeRunner(hook=lambda plan: time.sleep(0.005), **EMBED)
    made = engine(runner, max_sequences=1)
    try:
        runner.gate.clear()
        first, second, third = (
            made.submit_pooled([i] * 150, priority=i, timeout=t) for i, t in enumerate((9, 9, 0.05))
        )
        second.cancel()
        time.sleep(0.1)
        runner.gate.set()
        result = first.result(5)
        assert isinstance(result, PoolingOutput)
        assert second.wait(5).finish_reason == "cancelled"
        with pytest.raises(CancelledError, match="the request was cancelled"):
            second.result(5)
        with pytest.raises(TimeoutError, match="the request's timeout passed before its prompt was computed"):
            third.result(5)
        assert third.wait().data is None
        with pytest.raises(TimeoutError, match="timeout passed"):
            made.embed([[1] * 150] * 20, timeout=0.05)
        last = made.submit_pooled([5] * 150)
    finally:
        made.close()
    assert last.wait(0).finish_reason in ("cancelled", "stop")
    with pytest.raises(ClosedError, match="the engine is closed"):
        made.embed([1])


def test_faults() -> None:
    def hook(plan: Any) -> None:
        if any(item.sequence.tokens[0] == 13 for item in plan.items):
            raise RuntimeError("it broke")

    class Broken(FakeRunner):
        def dense(self, pooled: Any) -> Any:
            if len(pooled) > 1:
                raise RuntimeError("no dense")
            return pooled * np.nan if pooled[0, 0] == next_logits([7])[0] else pooled

    with engine(Broken(hook=hook, dense="dense", **EMBED)) as made:
        with pytest.raises(ModelError, match="the step failed: RuntimeError: it broke"):
            made.embed([13, 1])
        with pytest.raises(ModelError, match="the model gives values that are not finite"):
            made.embed([7])
        np.testing.assert_allclose(made.embed([8]), [expected([8], "last")], rtol=1e-5)
        runner: Any = made._runner
        runner.gate.clear()
        handles = [made.submit_pooled([i]) for i in range(3)]
        runner.gate.set()
        assert any("no dense" in str(handle.wait(5).error) for handle in handles)
        assert made.stats().blocks_free == 64
        assert made.stats().running == 0


def test_asyncio(prompts: list[list[int]]) -> None:
    async def run() -> None:
        with engine(FakeRunner(**EMBED)) as made:
            every = await asyncio.gather(*(made.aembed(prompts[i % 12]) for i in range(64)))
            np.testing.assert_allclose(
                np.concatenate(every), [expected(prompts[i % 12], "last") for i in range(64)], rtol=1e-5
            )
            handle = made.submit_pooled(prompts[0])
            both = await asyncio.gather(handle, handle)
            assert both[0] is both[1] is await handle
            with pytest.raises(InvalidArgumentError, match=r"embed: prompts\[0\]: prompt: token 0: expected an id"):
                await made.aembed([[-1]])

    asyncio.run(run())


def test_a_cancelled_task_cancels_its_requests() -> None:
    async def run() -> None:
        runner = FakeRunner(hook=lambda plan: time.sleep(0.005), **EMBED)
        with engine(runner) as made:
            task = asyncio.create_task(made.aembed([[i] * 150 for i in range(30)]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(500):
                if made.stats().finished == 30:
                    break
                await asyncio.sleep(0.005)
            assert made.stats().finished == 30
            assert len(runner.plans) < 30 * 150 / 16

    asyncio.run(run())


def test_an_awaited_generation() -> None:
    async def run() -> Any:
        with engine(FakeRunner()) as made:
            return await made.submit([1, 2])

    assert len(asyncio.run(run()).token_ids) == 198


def test_wrong_types() -> None:
    with engine() as made, pytest.raises(ArgumentTypeError, match="priority: expected an integer, got 'x'"):
        made.embed([1], priority="x")  # type: ignore[arg-type]
