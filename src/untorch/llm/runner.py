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
from untorch.llm.settings import Settings, read_settings
from untorch.runtime.arrays import zeros
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.method import Method
from untorch.runtime.program import Program, load

if TYPE_CHECKING:
    from untorch.trust.policy import TrustPolicy

__all__ = ["Batch", "PackageRunner", "Runner", "kv_bytes"]

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DEFAULT_PART = 0.25  # of the memory that is available
_DEFAULT_DEVICE_PART = 0.8  # of the memory that the weights leave: a step needs some
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


class Batch:
    """The arguments of a step, but for the rows and the pool: the plan's tokens, one sequence behind the other."""

    __slots__ = ("block_table", "cu_seqlens_q", "positions", "seqlens_k", "slot_mapping", "tokens")

    def __init__(self, plan: Plan, block_size: int) -> None:
        items, total = plan.items, plan.tokens
        self.tokens = np.empty(total, np.int64)
        self.positions = np.empty(total, np.int64)
        self.slot_mapping = np.empty(total, np.int64)
        self.cu_seqlens_q = np.zeros(len(items) + 1, np.int32)
        self.seqlens_k = np.array([item.end for item in items], np.int32)
        columns = -(-int(self.seqlens_k.max()) // block_size)
        self.block_table = np.zeros((len(items), columns), np.int32)
        begin = 0
        for row, item in enumerate(items):
            sequence, end = item.sequence, begin + item.count
            assert sequence.table is not None
            blocks = sequence.table.blocks
            self.block_table[row, : len(blocks)] = blocks[:columns]
            self.cu_seqlens_q[row + 1] = end
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


class Runner(ABC):
    """What the engine asks of a model. blocks: pages of the pool."""

    settings: Settings
    blocks: int

    @abstractmethod
    def run(self, plan: Plan, rows: Sequence[int]) -> Logits:
        """The logits [rows, width] of these tokens of the plan. Copies the plan's blocks first."""

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
            row = self.settings.block_elements * _ITEMSIZE[self.settings.dtype]
            available, part = _available(), _DEFAULT_PART
            if program.device != "cpu":
                for _, method in self._methods:  # uploads the weights
                    method.open()
                available, part = program.memory()["free"], _DEFAULT_DEVICE_PART
            self.blocks = _block_count(self.settings, row, kv_memory, max_sequences, int(available * part))
            self._pool = zeros((self.blocks, self.settings.block_elements), self.settings.dtype, program.device)
            self._choose = None if self.settings.choose is None else program[self.settings.choose]
            sizes = graph_sizes if program.device != "cpu" else ()
            self._graphs = StepGraphs(sizes, self._pool, lambda *given: self._method(len(given[0])).graph(*given))
            self._graphs.prepare(progress or (lambda done, of: None))
        except BaseException:
            if self._owned:
                program.close()
            raise
        self._program = program

    def run(self, plan: Plan, rows: Sequence[int]) -> Logits:
        """The logits [rows, width] of these tokens of the plan. Copies the plan's blocks first."""
        for source, target in plan.copies:
            self._pool.copy_row(source, target)
        batch = Batch(plan, self.settings.block_size)
        sequences, tokens = len(batch.seqlens_k), len(batch.tokens)
        if tokens == sequences <= self._graphs.largest and list(rows) == list(range(sequences)):
            logits: Any = self._graphs.replay(
                batch.tokens, batch.positions, batch.block_table, batch.seqlens_k, batch.slot_mapping
            )
        else:
            logits = self._method(tokens)(
                batch.tokens, batch.positions, np.array(rows or [0], np.int64), batch.block_table, batch.cu_seqlens_q,
                batch.seqlens_k, batch.slot_mapping, self._pool,
            )  # fmt: skip
        if self._choose is not None and isinstance(logits, Tensor):
            return DeviceLogits(logits, len(rows), self._choose)
        found: NDArray[np.float32] = logits.numpy() if isinstance(logits, Tensor) else np.asarray(logits)
        return Logits(found[: len(rows)])

    def _method(self, tokens: int) -> Method:
        """The one that is tuned for at least that many tokens, else for the most."""
        return next((method for count, method in self._methods if count >= tokens), self._methods[-1][1])

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
    if kv_memory is not None:
        count = kv_bytes(kv_memory) // row
        if count < 1:
            raise InvalidArgumentError(
                f"Engine: kv_memory: expected at least {row} bytes, one block of {settings.block_size} positions, got "
                f"{kv_memory!r}"
            )
        return count
    enough = max_sequences * -(-settings.max_positions // settings.block_size)
    return max(1, min(enough, default // row))


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 4 << 30
