"""CUDA graphs of steps that decode, padded to a few sizes: one token a sequence, or several to verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.slots import NO_SLOT
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["StepGraphs", "graph_sizes", "read_sizes", "text_positions"]

_FEWEST_COLUMNS = 64  # of the block table; the next size is four times as wide

Arguments = tuple[Any, ...]


def graph_sizes(max_sequences: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … up to the number of sequences."""
    sizes = [1, 2, 4, *range(8, max_sequences, 8)]
    return [size for size in sizes if size < max_sequences] + [max_sequences]


def text_positions(places: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Positions of a text, from the tokens' places in their sequences: [T], or [rows, T]."""
    return places if rows == 1 else np.repeat(places[None], rows, axis=0)


def read_sizes(given: Any, max_sequences: int) -> list[int]:
    """Of the engine's argument cuda_graphs. Raises InvalidArgumentError."""
    if isinstance(given, bool):
        return graph_sizes(max_sequences) if given else []
    if not isinstance(given, Sequence) or not all(
        isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= max_sequences for size in given
    ):
        raise InvalidArgumentError(
            f"Engine: cuda_graphs: expected True, False, or numbers of sequences from 1 to max_sequences "
            f"({max_sequences}), got {given!r}"
        )
    return sorted(set(given))


class StepGraphs:
    """Replays the graph that fits a step; captures it where there is none yet.

    capture: makes a graph from one whose memory it shares, or None, and the arguments of a step. The block table has
    64 columns, or 4, 16, … times as many; ``prepare`` captures all sizes for the narrowest one. states: of recurrent
    layers, where the model has some.
    position_rows: of the positions, which are [T] if there is one.
    most_tokens: of a sequence in a step with drafts. Above 1, each size has a graph for that many tokens a sequence,
    too: which sequence has how many of them, and which logits are wanted, is in its inputs.
    block_sizes: positions a block, of each group of layers with a block table: larger ones need fewer columns.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        pool: Any,
        capture: Callable[..., Any],
        states: Any = None,
        most_tokens: int = 1,
        block_sizes: Sequence[int] = (1,),
        position_rows: int = 1,
    ) -> None:
        self._sizes, self._position_rows = sorted(sizes), position_rows
        self._pool, self._capture, self._states, self._most = pool, capture, states, most_tokens
        self._block_sizes = tuple(block_sizes)
        self._graphs: dict[tuple[int, int, int], Any] = {}

    @property
    def largest(self) -> int:
        """The most sequences that a graph serves."""
        return self._sizes[-1] if self._sizes else 0

    @property
    def count(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Captures, the largest first; ``progress`` gets how many are done, and how many there will be."""
        kinds = [(size, each) for size in reversed(self._sizes) for each in sorted({1, self._most})]
        for done, (size, each) in enumerate(kinds):
            progress(done, len(kinds))
            self._graph(size, _FEWEST_COLUMNS, each)
        progress(len(kinds), len(kinds))

    def capture_largest(self) -> None:
        """The one that takes most memory."""
        if self._sizes:
            self._graph(self._sizes[-1], _FEWEST_COLUMNS, self._most)

    def padded(self, count: int) -> int:
        """The sequences of the graph that serves that many; the number itself if none does."""
        return next((size for size in self._sizes if size >= count), count)

    def serves(self, tokens: int, sequences: int, is_plain: bool = True) -> bool:
        """Whether there is a graph for a step with that many. is_plain: a token and its logits for each sequence."""
        if sequences > self.largest:
            return False
        return is_plain or (self._most > 1 and tokens <= self._most * self.padded(sequences))

    def replay(
        self, tokens: Any, positions: NDArray[np.int64], tables: Sequence[NDArray[np.int32]],
        lengths: NDArray[np.int32], slots: Sequence[NDArray[np.int64]], state_slots: NDArray[np.int32] | None = None,
        ends: NDArray[np.int32] | None = None, rows: Sequence[int] = (),
    ) -> Any:  # fmt: skip
        """The logits of a step, those of padding behind them.

        tokens: On the host; or ``padded`` of them on the GPU, those of padding behind them.
        ends: cu_seqlens_q; None: each sequence has one token, whose logits are wanted.
        rows: With ends: the tokens whose logits are wanted.
        """
        count = len(lengths)
        size, each = self.padded(count), 1 if ends is None else self._most
        columns = _FEWEST_COLUMNS
        while any(table.shape[1] > most for table, most in zip(tables, self._widths(columns), strict=True)):
            columns *= 4
        given = _arguments(size, self._widths(columns), each, self._position_rows)
        given[1][..., : positions.shape[-1]], given[5][:count] = positions, lengths
        for own, table in zip(given[3], tables, strict=True):
            own[:count, : table.shape[1]] = table
        for own, places in zip(given[6], slots, strict=True):
            own[: len(places)] = places
        if ends is not None:
            given[2][: len(rows)], given[2][len(rows) :] = rows, 0
            given[4][: count + 1], given[4][count + 1 :] = ends, ends[-1]
        if isinstance(tokens, np.ndarray):
            given[0][: len(tokens)] = tokens
            tokens = given[0]
        return self._graph(size, columns, each)(tokens, *_flat(given)[1:], *self._pools(size, state_slots))

    def close(self) -> None:
        """Free their memory."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _graph(self, size: int, columns: int, each: int) -> Any:
        key = size, columns, each
        if key not in self._graphs:
            shares = next(iter(self._graphs.values()), None)
            given = _arguments(size, self._widths(columns), each, self._position_rows)
            self._graphs[key] = self._capture(shares, *_flat(given), *self._pools(size, None))
        return self._graphs[key]

    def _widths(self, columns: int) -> list[int]:
        """Of the groups' block tables, where that of the smallest blocks has so many columns."""
        smallest = min(self._block_sizes)
        return [-(-columns * smallest // size) for size in self._block_sizes]

    def _pools(self, size: int, state_slots: NDArray[np.int32] | None) -> tuple[Any, ...]:
        """The arguments behind those of all models. Padding has no slot."""
        if self._states is None:
            return (self._pool,)
        slots = np.full(size, NO_SLOT, np.int32)
        if state_slots is not None:
            slots[: len(state_slots)] = state_slots
        return self._pool, slots, self._states


def _arguments(size: int, columns: Sequence[int], each: int, position_rows: int) -> Arguments:
    """Of a step in which every sequence is padding: it reads one position of block 0, and writes nothing.

    columns: of each group's block table. With several tokens for each, only the first ``size`` are of sequences.
    """
    total = size * each
    positions = text_positions(np.zeros(total, np.int64), position_rows)
    return (
        np.zeros(total, np.int64), positions, np.arange(total),
        tuple(np.zeros((size, count), np.int32) for count in columns), np.arange(size + 1, dtype=np.int32),
        np.ones(size, np.int32), tuple(np.full(total, -1, np.int64) for _ in columns),
    )  # fmt: skip


def _flat(given: Arguments) -> tuple[Any, ...]:
    """As methods take them: the table of an only group is no tuple."""
    return tuple(one[0] if isinstance(one, tuple) and len(one) == 1 else one for one in given)
