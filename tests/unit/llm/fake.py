"""A model for tests of the engine: logits from the tokens that it finds in the pages, so wrong pages show."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from untorch.llm.logits import Choice, Draws, Logits
from untorch.llm.paged_model import Batch
from untorch.llm.processors import Changes, apply_changes
from untorch.llm.runner import Runner
from untorch.llm.sampler import _inverse, _nucleus, token_logprobs
from untorch.llm.scheduler import Plan
from untorch.llm.settings import DraftSettings, Settings

VOCABULARY = 64


def next_logits(tokens: Sequence[int]) -> np.ndarray:
    """What the model says behind these tokens."""
    seed = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32) * 3


def repetitive_logits(tokens: Sequence[int]) -> np.ndarray:
    """Mostly by the last token alone, so the text repeats itself; sometimes by all of them."""
    everything = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    seed = everything if everything % 16 == 0 else int(tokens[-1]) % 24
    return np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32) * 3


def greedy(
    prompt: Sequence[int], count: int, model: Callable[[Sequence[int]], np.ndarray] = next_logits
) -> list[int]:  # fmt: skip
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(tokens).argmax()))
    return tokens[len(prompt) :]


class GpuChoice(Choice):
    """``wait`` is noted among the runner's events."""

    def __init__(
        self, tokens: np.ndarray, step: int, events: list[tuple[str, int]], logprobs: tuple[np.ndarray, ...] = ()
    ) -> None:
        self.device, self.step, self.events, self.computed = tokens, step, events, logprobs

    def wait(self) -> np.ndarray:
        self.events.append(("wait", self.step))
        return self.device

    def logprobs(self) -> tuple[np.ndarray, ...]:
        return self.computed


class GpuLogits(Logits):
    """As if they were on a GPU: tokens are chosen there. processes: as a package that has the methods for it."""

    can_choose = True

    def __init__(
        self, values: np.ndarray, step: int, events: list[tuple[str, int]], processes: bool, fetched: list[int]
    ) -> None:  # fmt: skip
        super().__init__(values)
        self.step, self.events, self.processes, self.fetched = step, events, processes, fetched

    @property
    def can_process(self) -> bool:
        return self.processes

    def numpy(self) -> np.ndarray:
        self.fetched.append(self.step)
        return self._values

    def choose(self, draws: Draws, changes: Changes | None = None, wanted: np.ndarray | None = None) -> Choice:
        values = self._values[draws.rows].copy()
        if changes is not None:
            assert self.processes
            apply_changes(values, changes)
        chosen = values.argmax(axis=1)
        usable = np.isfinite(values.max(axis=1))
        for i, temperature in enumerate(draws.temperature):
            if temperature and usable[i]:
                weights = np.exp((values[i] - values[i].max()) / temperature).astype(np.float32)
                weights[weights < draws.min_p[i]] = 0
                ids, kept = _nucleus(weights, int(draws.top_k[i]) or values.shape[1], float(draws.top_p[i]))
                chosen[i] = ids[_inverse(kept[None], draws.uniform[i : i + 1])[0]]
        chosen[~usable] = -1
        if wanted is None:
            return GpuChoice(chosen, self.step, self.events)
        assert self.processes
        found = [
            token_logprobs(self._values[row], max(token, 0), 20) for row, token in zip(draws.rows, chosen, strict=True)
        ]
        arrays = (
            np.array([one.logprob for one in found]), np.array([one.rank for one in found]),
            np.array([[logprob for _, logprob in one.top] for one in found]),
            np.array([[token for token, _ in one.top] for one in found]),
        )  # fmt: skip
        for row, count in enumerate(wanted.tolist()):
            arrays[2][row, count:], arrays[3][row, count:] = 0, 0
        return GpuChoice(chosen, self.step, self.events, arrays)


class FakeRunner(Runner):
    """Its pool has a token for each position. hook: called before each step, with the plan. model: tokens to logits. draft: the same
    of a draft model, whose pool is ``draft_pool``.

    gpu: tokens are chosen where the logits are. processes: as GpuLogits. events: the steps that were run and waited for.
    fetched: those whose logits were brought to the host.
    """

    def __init__(
        self,
        blocks: int = 64,
        size: int = 4,
        hook: Callable[[Plan], Any] | None = None,
        files: dict[str, bytes] | None = None,
        gpu: bool = False,
        processes: bool = True,
        model: Callable[[Sequence[int]], np.ndarray] = next_logits,
        draft: Callable[[Sequence[int]], np.ndarray] | None = None,
        **settings: Any,
    ) -> None:
        given = {"vocabulary": VOCABULARY, "max_positions": 200, "stop_ids": (), **settings}
        if draft is not None:
            given["draft"] = DraftSettings(given["vocabulary"], 1, "float32", ((16, "draft_step_16"),))
        self.settings = Settings(block_size=size, **given)
        widest = max(group.size for group in self.settings.groups)
        self.draft, self.draft_pool = draft, np.full((blocks, self.settings.groups[0].size), -1)
        self.proposals: list[list[tuple[int, int]]] = []
        self.blocks, self.size = blocks, size
        self.pool = np.full((blocks, widest), -1)
        self.hook, self.files = hook, files or {}
        self.gpu, self.processes, self.model = gpu, processes, model
        self.plans: list[list[tuple[int, int]]] = []
        self.events: list[tuple[str, int]] = []
        self.fetched: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        self.gate.wait()
        self.events.append(("run", len(self.plans)))
        self.plans.append([(item.start, item.count) for item in plan.items])
        if self.hook is not None:
            self.hook(plan)
        values = self._compute(self.model, self.pool, plan, rows, tokens)
        return self._logits(values, len(self.plans) - 1)

    def propose(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        assert self.draft is not None
        self.proposals.append([(item.start, item.count) for item in plan.items])
        values = self._compute(self.draft, self.draft_pool, plan, rows, tokens)
        return self._logits(values, -len(self.proposals))

    def _logits(self, values: np.ndarray, step: int) -> Logits:
        return GpuLogits(values, step, self.events, self.processes, self.fetched) if self.gpu else Logits(values)

    def _compute(
        self, model: Callable[[Sequence[int]], np.ndarray], pool: np.ndarray, plan: Plan, rows: Sequence[int], tokens: Any
    ) -> np.ndarray:  # fmt: skip
        for source, target in plan.copies:
            pool[target] = pool[source]
        if not plan.items:
            return np.empty((0, 0), np.float32)
        groups = self.settings.groups if pool is self.pool else self.settings.groups[:1]
        batch = Batch(plan, [group.size for group in groups], tokens is None, range(len(groups)))
        if tokens is not None:
            batch.tokens[:] = tokens
        for group, slots in zip(groups, batch.slot_mappings, strict=True):
            assert len(set(slots.tolist())) == len(slots)
            pool[slots // group.size, slots % group.size] = batch.tokens
        logits = []
        for row in rows:
            sequence = int(np.searchsorted(batch.cu_seqlens_q, row, side="right")) - 1
            end = int(batch.positions[row]) + 1
            found = []
            for group, table in zip(groups, batch.block_tables, strict=True):
                pages = table[sequence, : -(-end // group.size)]
                found.append(pool[pages, : group.size].reshape(-1)[:end])
                first = group.first_seen(end - 1)
                assert (found[-1][first:] == found[0][first:]).all(), "a group has other tokens"
            logits.append(model(found[0]))
        return np.array(logits, np.float32).reshape(len(rows), self.settings.vocabulary)

    def file(self, name: str) -> bytes:
        return self.files[name]

    def close(self) -> None:
        self.closed = True


class StatefulRunner(FakeRunner):
    """One that keeps a state of each sequence beside the pages: the checksum of its tokens, in its slot."""

    def __init__(self, blocks: int = 64, size: int = 4, snapshots: int = 0, **settings: Any) -> None:
        super().__init__(blocks, size, state_elements=1, **settings)
        self.states: dict[int, int] = {}
        self.snapshots = snapshots

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        logits = super().run(plan, rows, tokens)
        for source, target in plan.state_copies:
            self.states[target] = self.states[source]
        slots = [item.sequence.slot for item in plan.items]
        assert min(slots) >= 0 and len(set(slots)) == len(slots)
        for slot, item in zip(slots, plan.items, strict=True):
            assert item.sequence.table is not None
            known = self.pool[item.sequence.table.blocks].reshape(-1)[: item.end].astype(np.int64)
            before = self.states[slot] if item.start else 0
            self.states[slot] = zlib.crc32(known[item.start :].tobytes(), before)
            assert self.states[slot] == zlib.crc32(known.tobytes()), "the slot has another state"
        return logits


class TextRunner(FakeRunner):
    """Says one text whatever the prompt is, byte by byte."""

    def __init__(self, text: str, template: str | None = None, **settings: Any) -> None:
        from untorch.llm.tokenizer import Tokenizer

        files = {"tokenizer.json": byte_tokenizer()}
        if template is not None:
            files["template"] = template.encode()
            settings["chat_template"] = "template"
        super().__init__(files=files, vocabulary=258, tokenizer="tokenizer.json", stop_ids=(257,), **settings)
        self.script = [*Tokenizer(files["tokenizer.json"]).encode(text), 257]

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        wanted = [
            len(item.sequence.tokens) - item.sequence.prompt_length + place
            for item in plan.items
            if item.end - item.drafted == len(item.sequence.tokens)
            for place in range(item.drafted + 1)
        ]
        logits = np.zeros((len(rows), 258), np.float32)
        for at, place in enumerate(wanted):
            logits[at, self.script[place % len(self.script)]] = 9
        return Logits(logits)


def byte_tokenizer(special: Sequence[str] = ("<s>", "</s>")) -> bytes:
    """tokenizer.json of one token a byte: its ids are 0 to 255, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    text: str = tokenizer.to_str()
    return text.encode()
