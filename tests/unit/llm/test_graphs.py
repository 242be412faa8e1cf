"""CUDA graphs of decoding steps: which one serves a step, and what it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import FakeRunner
from untorch.llm import Engine
from untorch.llm.graphs import StepGraphs, graph_sizes
from untorch.runtime.errors import InvalidArgumentError


class Captured:
    def __init__(self, *given: Any) -> None:
        *given, self.pool = given  # type: ignore[assignment]
        self.shapes = [array.shape for array in given]
        self.dtypes = [array.dtype for array in given]
        self.closed = False
        self.given: tuple[Any, ...] = ()

    def __call__(self, *given: Any) -> Captured:
        *given, pool = given  # type: ignore[assignment]
        assert pool is self.pool
        assert [array.shape for array in given] == self.shapes
        assert [array.dtype for array in given] == self.dtypes
        self.given = given
        return self

    def close(self) -> None:
        self.closed = True


def step(count: int, width: int) -> tuple[Any, ...]:
    return (
        np.arange(count) + 5, np.arange(count) + 9, [np.arange(count * width, dtype=np.int32).reshape(count, width)],
        np.arange(count, dtype=np.int32) + 10, [np.arange(count) + 100],
    )  # fmt: skip


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64)[-3:] == [48, 56, 64]


def test_a_step_is_padded_to_the_next_size() -> None:
    made: list[Captured] = []

    def capture(shares: Any, *given: Any) -> Captured:
        assert shares is (made[0] if made else None)
        made.append(Captured(*given))
        return made[-1]

    seen: list[tuple[int, int]] = []
    graphs = StepGraphs([1, 4], object(), capture)
    graphs.prepare(lambda done, of: seen.append((done, of)))
    assert seen == [(0, 2), (1, 2), (2, 2)] and graphs.count == 2
    assert [graph.shapes[3] for graph in made] == [(4, 64), (1, 64)]

    used = graphs.replay(*step(3, 2))
    assert used is made[0]
    tokens, positions, rows, table, ends, lengths, slots = used.given
    assert tokens.tolist() == [5, 6, 7, 0] and positions.tolist() == [9, 10, 11, 0] and rows.tolist() == [0, 1, 2, 3]
    assert table[:3, :2].tolist() == [[0, 1], [2, 3], [4, 5]] and not table[:, 2:].any() and not table[3].any()
    # Padding reads one position, and writes nowhere.
    assert ends.tolist() == [0, 1, 2, 3, 4] and lengths.tolist() == [10, 11, 12, 1]
    assert slots.tolist() == [100, 101, 102, -1]
    assert graphs.replay(*step(1, 64)) is made[1]

    wide = graphs.replay(*step(2, 65))
    assert wide.shapes[3] == (4, 256) and graphs.count == 3
    assert graphs.replay(*step(4, 256)) is wide
    graphs.close()
    assert all(graph.closed for graph in made)


def test_positions_of_several_rows() -> None:
    graphs = StepGraphs([4], object(), lambda shares, *given: Captured(*given), position_rows=3)
    tokens, positions, *rest = step(3, 2)
    used = graphs.replay(tokens, np.stack([positions, positions - 1, positions - 2]), *rest)
    assert used.given[1].tolist() == [[9, 10, 11, 0], [8, 9, 10, 0], [7, 8, 9, 0]]


def test_steps_with_drafts_have_graphs_of_their_own() -> None:
    made: list[Captured] = []

    def capture(shares: Any, *given: Any) -> Captured:
        assert shares is (made[0] if made else None)
        made.append(Captured(*given))
        return made[-1]

    seen: list[tuple[int, int]] = []
    graphs = StepGraphs([1, 4], object(), capture, most_tokens=3)
    graphs.prepare(lambda done, of: seen.append((done, of)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] and graphs.count == 4
    assert [graph.shapes[0] for graph in made] == [(4,), (12,), (1,), (3,)]
    assert [graph.shapes[3:5] for graph in made] == [[(4, 64), (5,)]] * 2 + [[(1, 64), (2,)]] * 2
    assert graphs.serves(2, 2) and graphs.serves(12, 4, False) and graphs.serves(12, 3, False)
    assert not graphs.serves(13, 4, False) and not graphs.serves(5, 5) and not graphs.serves(5, 1, False)
    assert not StepGraphs([4], object(), capture).serves(2, 2, False)

    # Two sequences with three tokens and one; the logits of all but the second are wanted.
    tokens, positions, slots = np.arange(4) + 5, np.array([7, 8, 9, 3]), np.arange(4) + 100
    table, lengths = np.array([[1, 2], [3, 0]], np.int32), np.array([10, 4], np.int32)
    used = graphs.replay(tokens, positions, [table], lengths, [slots], None, np.array([0, 3, 4], np.int32), [0, 2, 3])
    assert used is made[1]
    assert [array.tolist() for array in used.given[:3]] == [
        [5, 6, 7, 8] + [0] * 8, [7, 8, 9, 3] + [0] * 8, [0, 2, 3] + [0] * 9,
    ]  # fmt: skip
    # Padding: sequences without tokens, and tokens behind all sequences, which are written nowhere.
    assert used.given[4].tolist() == [0, 3, 4, 4, 4] and used.given[5].tolist() == [10, 4, 1, 1]
    assert used.given[6].tolist() == [100, 101, 102, 103] + [-1] * 8
    assert used.given[3][:2, :2].tolist() == table.tolist() and not used.given[3][2:].any()


def test_padding_has_no_state() -> None:
    made: list[tuple[Any, ...]] = []

    def capture(shares: Any, *given: Any) -> Any:
        made.append(given)
        return lambda *replayed: replayed

    pool, states = object(), object()
    graphs = StepGraphs([4], pool, capture, states)
    *_, kept, slots, rows = graphs.replay(*step(3, 2), np.array([7, 0, 2], np.int32))
    assert kept is pool and rows is states
    assert slots.tolist() == [7, 0, 2, -1] and slots.dtype == np.int32
    *_, kept, slots, rows = made[0]
    assert kept is pool and rows is states and slots.tolist() == [-1] * 4 and slots.dtype == np.int32


def test_groups_of_layers_have_tables_of_their_own() -> None:
    """Those of larger blocks are narrower. All shapes follow from sizes and the first group's columns."""
    made: list[tuple[Any, ...]] = []

    def capture(shares: Any, *given: Any) -> Any:
        made.append(given)
        return lambda *replayed: replayed

    graphs = StepGraphs([4], object(), capture, block_sizes=(80, 16))
    tokens, positions, [table], lengths, [slots] = step(3, 64)
    tokens, positions, _, tables, _, _, mappings, _ = graphs.replay(
        tokens, positions, [table[:, :13], table], lengths, [slots, slots + 7]
    )
    assert [one.shape for one in tables] == [(4, 13), (4, 64)] == [one.shape for one in made[0][3]]
    assert tables[0][:3].tolist() == table[:, :13].tolist() and tables[1][:3].tolist() == table.tolist()
    assert [one.tolist() for one in mappings] == [[100, 101, 102, -1], [107, 108, 109, -1]]
    assert [one.tolist() for one in made[0][6]] == [[-1] * 4] * 2
    for widths in ((13, 65), (14, 1)):
        tables = graphs.replay(tokens[:3], positions[:3], [np.zeros((3, n), np.int32) for n in widths], lengths,
                               [slots, slots])[3]  # fmt: skip
        assert [one.shape for one in tables] == [(4, 52), (4, 256)]
    assert graphs.count == 2


def test_no_sizes() -> None:
    assert StepGraphs([], None, Captured).largest == 0


@pytest.mark.parametrize("given", [[0], [65], ["8"], 8, [True]])
def test_wrong_sizes(given: Any) -> None:
    from untorch.llm.graphs import read_sizes

    with pytest.raises(InvalidArgumentError, match=r"Engine: cuda_graphs: expected True, False, or numbers of seq"):
        read_sizes(given, 64)


def test_sizes_of_an_engine() -> None:
    from untorch.llm.graphs import read_sizes

    assert read_sizes([4, 1, 4], 8) == [1, 4] and read_sizes(False, 8) == [] and read_sizes(True, 2) == [1, 2]
    Engine(FakeRunner(), cuda_graphs=[1]).close()
