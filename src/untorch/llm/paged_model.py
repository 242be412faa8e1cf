"""A model's step over a pool of pages: the plan as arrays, and the package's method or CUDA graph that fits best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.llm.graphs import StepGraphs, text_positions
from untorch.llm.logits import DeviceLogits, DeviceMethods, Draws, Logits
from untorch.llm.lora import Loras
from untorch.llm.processors import gather_changes
from untorch.llm.scheduler import Plan, Scheduled
from untorch.llm.slots import NO_SLOT
from untorch.runtime.method import Graph, Method

__all__ = ["Batch", "PagedModel", "plan_embeddings", "plan_loras"]


class Batch:
    """The arguments of a step, but for the rows and the pools: the plan's tokens, one sequence behind the other.
    Positions behind a sequence's tokens have those of its draft.

    block_sizes: positions a page of each of the groups that the model has block tables of; a number: of its only one.
    groups: which of the sequences' groups these are. knows_tokens: False: they are still being chosen, and are not in
    the sequences. places: of the tokens in their sequences. positions: the same, or [position_rows, T] of rotary
    embeddings.
    """

    __slots__ = (
        "_groups", "_sizes", "block_tables", "cu_seqlens_q", "places", "positions", "seqlens_k", "slot_mappings",
        "state_slots", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        block_sizes: int | Sequence[int],
        knows_tokens: bool = True,
        groups: Sequence[int] | None = None,
        position_rows: int = 1,
    ) -> None:
        self._sizes = (block_sizes,) if isinstance(block_sizes, int) else tuple(block_sizes)
        self._groups = range(len(self._sizes)) if groups is None else groups
        items, total = plan.items, plan.tokens
        starts = np.array([item.start for item in items], np.int64)
        counts = np.array([item.count for item in items], np.int64)
        self.cu_seqlens_q = np.zeros(len(items) + 1, np.int32)
        np.cumsum(counts, out=self.cu_seqlens_q[1:])
        self.seqlens_k = (starts + counts).astype(np.int32)
        self.state_slots = np.array([item.sequence.slot for item in items], np.int32)
        self.tokens = _tokens(items) if knows_tokens else np.zeros(total, np.int64)
        of = np.repeat(np.arange(len(items)), counts)  # the item of each token
        self.places = np.arange(total) + (starts - self.cu_seqlens_q[:-1])[of]
        self.positions = text_positions(self.places, position_rows)
        if position_rows > 1:
            for item, begin in zip(items, self.cu_seqlens_q.tolist(), strict=False):
                if item.sequence.embeddings is not None:
                    item.sequence.embeddings.place(item.start, self.positions[:, begin : begin + item.count])
        longest = int(self.seqlens_k.max())
        self.block_tables: list[NDArray[np.int32]] = []
        self.slot_mappings: list[NDArray[np.int64]] = []
        for group, size in zip(self._groups, self._sizes, strict=True):
            table = _block_table(items, group, -(-longest // size))
            blocks = table[of, self.places // size].astype(np.int64)
            self.block_tables.append(table)
            self.slot_mappings.append(blocks * size + self.places % size)

    @property
    def block_table(self) -> Any:
        """As methods take it: an array, or one of each group."""
        return self.block_tables[0] if len(self._sizes) == 1 else tuple(self.block_tables)

    @property
    def slot_mapping(self) -> Any:
        """As methods take it: an array, or one of each group."""
        return self.slot_mappings[0] if len(self._sizes) == 1 else tuple(self.slot_mappings)

    def go_on(self, plan: Plan) -> None:
        """Becomes the arguments of the step behind: the same sequences, one token each, which is still being chosen."""
        self.places += 1
        if self.positions is not self.places:
            self.positions += 1
        self.seqlens_k += 1
        for i, (group, size) in enumerate(zip(self._groups, self._sizes, strict=True)):
            slots = self.slot_mappings[i]
            slots += 1
            for row in np.flatnonzero(self.places % size == 0).tolist():
                table = plan.items[row].sequence.table
                assert table is not None
                column = int(self.places[row]) // size
                if column >= self.block_tables[i].shape[1]:
                    wider = np.zeros((plan.tokens, column + 1), np.int32)
                    wider[:, : self.block_tables[i].shape[1]] = self.block_tables[i]
                    self.block_tables[i] = wider
                block = table.groups[group].blocks[column]
                self.block_tables[i][row, column] = block
                slots[row] = block * size


def _block_table(items: Sequence[Scheduled], group: int, columns: int) -> NDArray[np.int32]:
    table = np.zeros((len(items), columns), np.int32)
    for row, item in enumerate(items):
        assert item.sequence.table is not None
        blocks = item.sequence.table.row(group)[:columns]
        table[row, : len(blocks)] = blocks
    return table


def _tokens(items: Sequence[Scheduled]) -> NDArray[np.int64]:
    """Those of the sequences, and of their drafts behind them."""
    found: list[int] = []
    for item in items:
        start, end, known = item.start, item.end, item.sequence.tokens
        found += known[start:end]
        if end > len(known):
            first = max(start - len(known), 0)
            found += item.sequence.draft[first : first + end - max(start, len(known))]
    return np.array(found, np.int64)


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


def plan_loras(plan: Plan, loras: Loras) -> tuple[Any, NDArray[np.int32]] | None:
    """The array of all adapters, and the columns of each token's [T, 2]; None: no token goes through one."""
    if all(item.sequence.lora is None for item in plan.items):
        return None
    now = loras.now
    ranges = np.array(
        [(0, 0) if item.sequence.lora is None else now.columns[item.sequence.lora] for item in plan.items], np.int32
    )
    return now.array, np.repeat(ranges, [item.count for item in plan.items], axis=0)


class PagedModel:
    """The methods of one model of a package, with the pools that they write.

    methods, embeds, adapted: by the tokens that they are tuned for, ascending. choose: the methods that choose tokens
    on the GPU. block_sizes: positions a page, of each group of layers with a block table. hidden: the width of
    embeddings as inputs. graph_sizes: numbers of sequences whose steps are CUDA graphs; most_tokens: of a sequence in
    them. vocabulary: tokens from there on are unknown to the model, and are 0 to it. adapted: the methods of steps with
    adapters, which ``loras`` has. groups: which groups of the sequences' tables these are. position_rows: as in
    Settings.
    """

    def __init__(
        self,
        methods: Sequence[tuple[int, Method]],
        embeds: Sequence[tuple[int, Method]],
        choose: DeviceMethods | None,
        block_sizes: Sequence[int],
        hidden: int,
        pool: Any,
        states: Any = None,
        graph_sizes: Sequence[int] = (),
        most_tokens: int = 1,
        vocabulary: int | None = None,
        adapted: Sequence[tuple[int, Method]] = (),
        loras: Loras | None = None,
        groups: Sequence[int] | None = None,
        position_rows: int = 1,
    ) -> None:
        self._methods, self._embeds, self._choose = methods, embeds, choose
        self._block_sizes, self._groups, self._hidden = tuple(block_sizes), groups, hidden
        self._pool, self._states, self._vocabulary = pool, states, vocabulary
        self._adapted, self._loras, self._position_rows = adapted, loras, position_rows
        self._last: tuple[Plan, Batch] | None = None
        self._most_tokens = most_tokens
        self._graphs = StepGraphs(
            graph_sizes, pool, self._capture, states, most_tokens, self._block_sizes, position_rows
        )  # fmt: skip

    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Captures CUDA graphs."""
        self._graphs.prepare(progress)

    def rehearse(self, tokens: int, sequences: int) -> None:
        """Takes the memory of the largest step, and of its CUDA graph, without a page that is read or written."""
        each = max(tokens // sequences, 1)
        total, rows = each * sequences, np.arange(min(each, self._most_tokens) * sequences)
        tables: Any = tuple(np.zeros((sequences, -(-each // size)), np.int32) for size in self._block_sizes)
        places: Any = tuple(np.full(total, -1, np.int64) for _ in self._block_sizes)
        if len(tables) == 1:
            (tables,), (places,) = tables, places
        slots = () if self._states is None else (np.full(sequences, NO_SLOT, np.int32), self._states)
        positions = text_positions(np.zeros(total, np.int64), self._position_rows)
        logits: Any = self._method(total, self._methods)(
            np.zeros(total, np.int64), positions, rows, tables,
            np.arange(sequences + 1, dtype=np.int32) * each, np.full(sequences, each, np.int32),
            places, self._pool, *slots,
        )  # fmt: skip
        if self._choose is not None and isinstance(logits, Tensor):
            count = len(rows)
            ones, zeros = np.ones(count, np.float32), np.zeros(count, np.int64)
            draws = Draws(rows, ones, zeros, ones * 0.9, ones * 0, ones * 0.5)
            on_device = DeviceLogits(logits, count, self._choose)
            if on_device.can_process:
                changes = gather_changes([None] * count, [None] * count, on_device.width, self._choose.vocabulary)
                on_device.choose(draws, changes, zeros).wait()
            else:
                on_device.choose(draws).wait()
        self._graphs.capture_largest()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """From and to, in this order."""
        for source, target in copies:
            self._pool.copy_row(source, target)

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """As ``Runner.run``."""
        self.copy_blocks(plan.copies)
        for source, target in plan.state_copies:
            self._states.copy_row(source, target)
        batch = self._batch(plan, tokens is None)
        sequences, count = len(batch.seqlens_k), len(batch.tokens)
        given = batch.tokens if tokens is None else tokens
        embeddings = plan_embeddings(plan, self._hidden) if self._embeds and tokens is None else None
        loras = None if self._loras is None else plan_loras(plan, self._loras)
        each = range(sequences)
        is_plain = count == sequences and (rows == each or list(rows) == list(each))
        if embeddings is None and loras is None and self._graphs.serves(count, sequences, is_plain):
            logits: Any = self._graphs.replay(
                given, batch.positions, batch.block_tables, batch.seqlens_k, batch.slot_mappings, batch.state_slots,
                *(() if is_plain else (batch.cu_seqlens_q, rows)),
            )  # fmt: skip
        else:
            methods = self._adapted if loras is not None else self._methods if embeddings is None else self._embeds
            method = self._method(count, methods)
            logits = method(
                given, batch.positions, np.array(rows or [0], np.int64), batch.block_table, batch.cu_seqlens_q,
                batch.seqlens_k, batch.slot_mapping, self._pool, *(loras or embeddings or ()),
                *(() if self._states is None else (batch.state_slots, self._states)),
            )  # fmt: skip
        if self._choose is not None and isinstance(logits, Tensor):
            # The step behind has the same sequences: it is a graph, or takes adapters and no padding.
            padding = {} if loras is not None else {"padded": self._graphs.padded}
            return DeviceLogits(logits, len(rows), self._choose, **padding)
        found: NDArray[np.float32] = logits.numpy() if isinstance(logits, Tensor) else np.asarray(logits)
        return Logits(found[: len(rows)])

    def close(self) -> None:
        """Free its CUDA graphs."""
        self._graphs.close()

    def _capture(self, shares: Graph | None, tokens: Any, *given: Any) -> Graph:
        method = self._method(len(tokens), self._methods)
        return method.graph(tokens, *given) if shares is None else shares.share(method, tokens, *given)

    def _batch(self, plan: Plan, knows_tokens: bool) -> Batch:
        last = self._last
        if not knows_tokens and last is not None and plan.behind is last[0] and last[0].tokens == plan.tokens:
            batch = last[1]
            batch.go_on(plan)
        else:
            batch = Batch(plan, self._block_sizes, knows_tokens, self._groups, self._position_rows)
            if self._vocabulary is not None:
                batch.tokens[batch.tokens >= self._vocabulary] = 0
        self._last = plan, batch
        return batch

    def _method(self, tokens: int, methods: Sequence[tuple[int, Method]]) -> Method:
        """The one that is tuned for at least that many tokens, else for the most."""
        return next((method for count, method in methods if count >= tokens), methods[-1][1])
