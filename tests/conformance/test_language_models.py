"""Architectures of transformers, eager, in continuous batching over pages: token for token what ``generate`` says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.language_models import MORE, REFUSED, SERVED, VOCABULARY, RoundedCache, greedy, make_model
from tests.vision_models import CONFIGS
from untorch.export import CompileError
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.step import Step
from untorch.llm import Engine, SamplingParams
from untorch.llm.logits import Logits
from untorch.llm.paged_model import Batch
from untorch.llm.runner import Runner
from untorch.llm.scheduler import Plan
from untorch.llm.settings import Settings
from untorch.ops.kv_pages import KV_DTYPES

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10
PROMPTS = [[5, 9, 3, 77, 21, 8, 4, 2, 61, 30, 11, 90, 14], [7, 8], [100, 3, 55, 42, 17, 200, 31], [5, 9, 3, 77, 21]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def as_tensors(given: Any) -> Any:
    """An array, or one of each group of layers."""
    return tuple(map(torch.from_numpy, given)) if isinstance(given, tuple) else torch.from_numpy(given)


class StepRunner(Runner):
    """A step that is not compiled, over a pool full of what no sequence wrote."""

    def __init__(self, step: Step, blocks: int, snapshots: int = 0) -> None:
        size = min(group.size for group in step.groups)
        self.settings = Settings(VOCABULARY, 128, size, state_elements=step.state_elements, groups=step.groups)
        self.blocks, self.step = blocks, step
        self.pool = torch.full((blocks, step.elements), 3.0).to(step.dtype)
        self.states, self.snapshots = torch.full((4 + snapshots, step.state_elements), 3.0), snapshots

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        for source, target in plan.copies:
            self.pool[target] = self.pool[source]
        for source, target in plan.state_copies:
            self.states[target] = self.states[source]
        batch = Batch(plan, [group.size for group in self.step.groups])
        arrays = (
            batch.tokens, batch.positions, np.array(rows or [0]), batch.block_table, batch.cu_seqlens_q,
            batch.seqlens_k, batch.slot_mapping,
        )  # fmt: skip
        states = (torch.from_numpy(batch.state_slots), self.states) if self.step.state_elements else ()
        with torch.no_grad():
            logits = self.step(*map(as_tensors, arrays), self.pool, *states)
        return Logits(logits.numpy()[: len(rows)])


def check_greedy(name: str) -> Step:
    """The step of a model, which gives the tokens of ``generate``."""
    model: Any = make_model(name)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    step = Step(model)
    check_chunks(step, VOCABULARY)
    check_model(step, VOCABULARY, 128)
    # Chunks of prompts beside decoding; five blocks of 16 for four sequences of up to 23 positions.
    with Engine(StepRunner(step, 5), max_batch_tokens=7, max_sequences=4) as engine:
        results = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW))
    assert [result.error for result in results] == [None] * len(PROMPTS)
    assert [result.token_ids for result in results] == expected
    assert len({token for tokens in expected for token in tokens}) > 3  # they do say something
    return step


@pytest.mark.parametrize("name", [*SERVED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_continuous_batching(name: str) -> None:
    check_greedy(name)


def test_the_docs_have_all_of_them() -> None:
    """scripts/render_llm.py measures them: run it for those that are new."""
    rows = json.loads(Path(__file__).parents[2].joinpath("docs", "llm.json").read_text())
    names = {*SERVED, *MORE}
    assert rows.keys() == names | {f"{name} with images" if name in names else name for name in CONFIGS}


@pytest.mark.parametrize("name", ["Qwen3Next", "GraniteMoeHybrid"])
def test_samples_of_models_with_states(name: str) -> None:
    model: Any = make_model(name)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS[:2]]
    with Engine(StepRunner(Step(model), 6), max_batch_tokens=7, max_sequences=4) as engine:
        results = engine.generate(PROMPTS[:2], SamplingParams(n=3, temperature=0, max_tokens=NEW))
    assert [[one.token_ids for one in result.completions] for result in results] == [[one] * 3 for one in expected]


@pytest.mark.parametrize(
    "name", ["Gemma2", "GptOss", "Llama4", "Qwen3Next", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in
             ("Gemma3", "Gemma3n", "Lfm2", "GraniteMoeHybrid", "KimiLinear"))],
)  # fmt: skip
def test_known_prefixes(name: str) -> None:
    """Windows need the end of a prefix alone, recurrent layers the state behind it: restored, it says the same."""
    model, step = make_model(name), Step(make_model(name))
    unit = max(group.size for group in step.groups)
    shared = [(7 * i + 3) % 250 for i in range(unit + 3)]
    prompts = [[*shared, 5, 9], [*shared, 30, 31, 32], [*shared, 8]]
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    has_states = step.state_elements > 0
    with Engine(StepRunner(step, 40, 3), max_batch_tokens=19, max_sequences=4) as engine:
        params = SamplingParams(temperature=0, max_tokens=NEW)
        results = [engine.generate(prompt, params) for prompt in prompts]
        assert [result.token_ids for result in results] == expected
        assert [result.usage.cached_tokens for result in results] == [0, unit, unit]
        stats = engine.stats()
        assert stats.prefix_hits == 2 and (stats.state_snapshots > 0) == has_states
        # All at once, and several of one prompt.
        assert [result.token_ids for result in engine.generate(prompts, params)] == expected
        several = engine.generate(prompts[1], SamplingParams(temperature=0, max_tokens=NEW, n=3))
        assert (
            several.usage.cached_tokens == unit and [one.token_ids for one in several.completions] == [expected[1]] * 3
        )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3n", "GptOss", "Llama4"])
def test_quantised_pages(name: str, kv_dtype: str) -> None:
    """``generate`` with a cache that rounds what it is given, as the pages do."""
    model: Any = make_model(name)
    expected = [greedy(model, prompt, NEW, RoundedCache(KV_DTYPES[kv_dtype])) for prompt in PROMPTS]
    step = Step(model)
    step.quantize_pages(KV_DTYPES[kv_dtype])
    check_chunks(step, VOCABULARY)
    with Engine(StepRunner(step, 5), max_batch_tokens=7, max_sequences=4) as engine:
        results = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW))
    assert [result.error for result in results] == [None] * len(PROMPTS)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [*((name, None) for name in REFUSED), ("Jamba", "int8"), ("Jamba", "fp8")]
)
def test_refused(name: str, kv_dtype: str | None) -> None:
    def make_step() -> None:
        step = Step(make_model(name))
        if kv_dtype is not None:
            step.quantize_pages(KV_DTYPES[kv_dtype])
        check_chunks(step, VOCABULARY)
        check_model(step, VOCABULARY, 512)

    with pytest.raises(CompileError) as caught:
        make_step()
    assert name in str(caught.value)
    reasons = "cannot be paged", "keeps state that pages cannot hold", "pages cannot follow", "fails over pages"
    assert any(reason in str(caught.value) for reason in reasons)
