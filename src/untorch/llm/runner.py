"""Runs a step of the model: the plan as arrays, the pool of pages, and the package's method that fits best."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.llm.graphs import StepGraphs
from untorch.llm.logits import DeviceLogits, Logits
from untorch.llm.scheduler import Plan
from untorch.llm.settings import KV_ITEMSIZE, Settings, read_settings
from untorch.runtime.arrays import zeros
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.method import Method
from untorch.runtime.program import Program, load

if TYPE_CHECKING:
    from untorch.trust.policy import TrustPolicy

__all__ = ["Batch", "PackageRunner", "Runner", "kv_bytes", "plan_embeddings"]

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DEFAULT_PART = 0.25  # of the memory that is available
_DEFAULT_DEVICE_PART = 0.8  # of the memory that the weights leave: a step needs some


class Batch:
    """The arguments of a step, but for the rows and the pools: the plan's tokens, one sequence behind the other.

    knows_tokens: False: they are still being chosen, and are not in the sequences.
    """

    __slots__ = ("block_table", "cu_seqlens_q", "positions", "seqlens_k", "slot_mapping", "state_slots", "tokens")

    def __init__(self, plan: Plan, block_size: int, knows_tokens: bool = True) -> None:
        items, total = plan.items, plan.tokens
        self.tokens = np.zeros(total, np.int64)
        self.positions = np.empty(total, np.int64)
        self.slot_mapping = np.empty(total, np.int64)
        self.cu_seqlens_q = np.zeros(len(items) + 1, np.int32)
        self.seqlens_k = np.array([item.end for item in items], np.int32)
        self.state_slots = np.array([item.sequence.slot for item in items], np.int32)
        columns = -(-int(self.seqlens_k.max()) // block_size)
        self.block_table = np.zeros((len(items), columns), np.int32)
        begin = 0
        for row, item in enumerate(items):
            sequence, end = item.sequence, begin + item.count
            assert sequence.table is not None
            blocks = sequence.table.blocks
            self.block_table[row, : len(blocks)] = blocks[:columns]
            self.cu_seqlens_q[row + 1] = end
            if knows_tokens:
                self.tokens[begin:end] = sequence.tokens[item.start : item.end]
            if item.count == 1:
                place = item.start
                self.positions[begin] = place
                self.slot_mapping[begin] = blocks[place // block_size] * block_size + place % block_size
            else:
                places = np.arange(item.start, item.end)
                self.positions[begin:end] = places
                table = self.block_table[row].astype(np.int64)
                self.slot_mapping[begin:end] = table[places // block_size] * block_size + places % block_size
            begin = end

    def go_on(self, plan: Plan, block_size: int) -> None:
        """Becomes the arguments of the step behind: the same sequences, one token each, which is still being chosen."""
        self.positions += 1
        self.seqlens_k += 1
        self.slot_mapping += 1
        for row in np.flatnonzero(self.positions % block_size == 0).tolist():
            table = plan.items[row].sequence.table
            assert table is not None
            column = int(self.positions[row]) // block_size
            if column >= self.block_table.shape[1]:
                wider = np.zeros((plan.tokens, column + 1), np.int32)
                wider[:, : self.block_table.shape[1]] = self.block_table
                self.block_table = wider
            self.block_table[row, column] = table.blocks[column]
            self.slot_mapping[row] = table.blocks[column] * block_size


def plan_embeddings(plan: Plan, hidden: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]] | None:
    """The caller's embeddings of the plan's tokens, and a mask of those that have one; None: no token has one."""
    if not any(
        item.sequence.embeddings is not None and item.sequence.embeddings.within(item.start, item.end)
        for item in plan.items
    ):
        return None
    rows, mask = np.zeros((plan.tokens, hidden), np.float32), np.zeros(plan.tokens, np.bool_)
    begin = 0
    for item in plan.items:
        end = begin + item.count
        if item.sequence.embeddings is not None:
            item.sequence.embeddings.fill(item.start, rows[begin:end], mask[begin:end])
        begin = end
    return rows, mask


class Runner(ABC):
    """What the engine asks of a model. blocks: pages of the pool."""

    settings: Settings
    blocks: int

    @abstractmethod
    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """The logits [rows, width] of these tokens of the plan. Copies the plan's blocks and states first.

        tokens: What an earlier step's logits chose (``Choice.device``), if they are the plan's tokens.
        """

    def dense(self, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The layers behind the pooling; only where ``settings.dense`` names them."""
        raise NotImplementedError

    def file(self, name: str) -> bytes:
        """A file of the package."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - a runner may hold nothing
        """Free what it holds."""


class PackageRunner(Runner):
    """A package of ``untorch.export.causal_lm``, with a pool where its methods run.

    On a GPU a step's small arrays are uploaded. Steps that decode alone are CUDA graphs, padded to ``graph_sizes``.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Program,
        kv_memory: int | str | None,
        max_sequences: int,
        num_threads: int,
        trust: TrustPolicy | str | os.PathLike[str] | None,
        graph_sizes: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._owned = not isinstance(source, Program)
        program = source if isinstance(source, Program) else load(source, num_threads=num_threads, trust=trust)
        try:
            self.settings = read_settings(program.manifest, program.path)
            self._methods = [(tokens, program[name]) for tokens, name in self.settings.methods]
            self._embeds = [(tokens, program[name]) for tokens, name in self.settings.embeds]
            row = self.settings.block_elements * KV_ITEMSIZE[self.settings.dtype]
            available, part = _available(), _DEFAULT_PART
            if program.device != "cpu":
                for _, method in self._methods:  # uploads the weights
                    method.open()
                available, part = program.memory()["free"], _DEFAULT_DEVICE_PART
            self.blocks = _block_count(self.settings, row, kv_memory, max_sequences, int(available * part))
            self._pool = zeros((self.blocks, self.settings.block_elements), self.settings.dtype, program.device)
            self._states: Any = None
            if self.settings.state_elements:
                self._states = zeros((max_sequences, self.settings.state_elements), "float32", program.device)
            self._last: tuple[Plan, Batch] | None = None
            self._choose = None if self.settings.choose is None else program[self.settings.choose]
            sizes = graph_sizes if program.device != "cpu" and self.settings.task == "generate" else ()
            self._graphs = StepGraphs(
                sizes, self._pool, lambda *given: self._method(len(given[0]), self._methods).graph(*given), self._states
            )
            self._graphs.prepare(progress or (lambda done, of: None))
        except BaseException:
            if self._owned:
                program.close()
            raise
        self._program = program

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """The logits [rows, width] of these tokens of the plan. Copies the plan's blocks and states first."""
        for source, target in plan.copies:
            self._pool.copy_row(source, target)
        for source, target in plan.state_copies:
            self._states.copy_row(source, target)
        batch = self._batch(plan, tokens is None)
        sequences, count = len(batch.seqlens_k), len(batch.tokens)
        given = batch.tokens if tokens is None else tokens
        embeddings = plan_embeddings(plan, self.settings.hidden) if self._embeds else None
        if embeddings is None and count == sequences <= self._graphs.largest and list(rows) == list(range(sequences)):
            logits: Any = self._graphs.replay(
                given, batch.positions, batch.block_table, batch.seqlens_k, batch.slot_mapping, batch.state_slots
            )  # fmt: skip
        else:
            method = self._method(count, self._methods if embeddings is None else self._embeds)
            logits = method(
                given, batch.positions, np.array(rows or [0], np.int64), batch.block_table, batch.cu_seqlens_q,
                batch.seqlens_k, batch.slot_mapping, self._pool, *(embeddings or ()),
                *(() if self._states is None else (batch.state_slots, self._states)),
            )  # fmt: skip
        if self._choose is not None and isinstance(logits, Tensor):
            return DeviceLogits(logits, len(rows), self._choose, self._graphs.padded)
        found: NDArray[np.float32] = logits.numpy() if isinstance(logits, Tensor) else np.asarray(logits)
        return Logits(found[: len(rows)])

    def _batch(self, plan: Plan, knows_tokens: bool) -> Batch:
        size = self.settings.block_size
        if self._last is not None and plan.behind is self._last[0] and self._last[0].tokens == plan.tokens:
            batch = self._last[1]
            batch.go_on(plan, size)
        else:
            batch = Batch(plan, size, knows_tokens)
        self._last = plan, batch
        return batch

    def _method(self, tokens: int, methods: Sequence[tuple[int, Method]]) -> Method:
        """The one that is tuned for at least that many tokens, else for the most."""
        return next((method for count, method in methods if count >= tokens), methods[-1][1])

    def dense(self, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The layers behind the pooling."""
        assert self.settings.dense is not None
        found: Any = self._program[self.settings.dense](pooled)
        return found.numpy() if isinstance(found, Tensor) else np.asarray(found)

    def file(self, name: str) -> bytes:
        """A file of the package."""
        return self._program._program.entry(name)

    def close(self) -> None:
        """Free what it holds."""
        self._graphs.close()
        if self._owned:
            self._program.close()


def kv_bytes(given: Any) -> int:
    """ "2GiB" → 2147483648. Raises InvalidArgumentError."""
    expected = 'expected bytes as an integer, or a string such as "512MiB" or "2GiB"'
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    if isinstance(given, str) and (match := re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", given)):
        number, unit = match.groups()
        try:
            value = int(float(number) * _UNITS[unit.upper()])
        except (KeyError, ValueError):
            value = 0
        if value > 0:
            return value
    raise InvalidArgumentError(f"Engine: kv_memory: {expected}, got {given!r}")


def _block_count(settings: Settings, row: int, kv_memory: Any, max_sequences: int, default: int) -> int:
    states = max_sequences * settings.state_elements * KV_ITEMSIZE["float32"]
    if kv_memory is not None:
        count = (kv_bytes(kv_memory) - states) // row
        if count < 1:
            what = f", and {states} for the states of {max_sequences} sequences" if states else ""
            raise InvalidArgumentError(
                f"Engine: kv_memory: expected at least {row + states} bytes, one block of {settings.block_size} "
                f"positions{what}, got {kv_memory!r}"
            )
        return count
    if states and states + row > default:
        raise InvalidArgumentError(
            f"Engine: max_sequences: the states of {max_sequences} sequences take {states} bytes, and {default} are "
            "for states, keys and values: choose fewer, or say kv_memory"
        )
    enough = max_sequences * -(-settings.max_positions // settings.block_size)
    return max(1, min(enough, (default - states) // row))


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 4 << 30
