"""The arguments of a model's methods, step by step."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from untorch.llm.blocks import BlockTable, GroupTable
from untorch.llm.logits import DeviceMethods, Draws
from untorch.llm.lora import Adapter, LorasNow
from untorch.llm.paged_model import PagedModel
from untorch.llm.prompt import Embeddings
from untorch.llm.scheduler import Plan, Scheduled
from untorch.llm.sequence import Sequence
from untorch.runtime.arrays import zeros


def sequence(tokens: list[int], draft: list[int], blocks: list[int]) -> Sequence:
    made = Sequence(tokens, draft=draft)
    made.table = BlockTable([GroupTable(blocks)])
    return made


def model(calls: list[list[Any]], **options: Any) -> PagedModel:
    def method(*given: Any) -> np.ndarray:
        calls.append([np.array(array).tolist() for array in given[:-1]])
        return np.zeros((len(given[2]), 4), np.float32)

    return PagedModel([(16, method)], [], None, [4], 0, object(), **options)  # type: ignore[list-item]


def test_tokens_of_a_draft_are_behind_those_of_the_sequence() -> None:
    calls: list[list[Any]] = []
    one = sequence([1, 2, 3, 4, 5], [6, 7, 8], [9, 3])
    model(calls).run(Plan([Scheduled(one, 4, 3, 2)], tokens=3), [0, 1, 2])
    assert calls == [[[5, 6, 7], [4, 5, 6], [0, 1, 2], [[9, 3]], [0, 3], [7], [12, 13, 14]]]


def test_steps_behind_each_other() -> None:
    """Tokens that are known are the step's own; those that are not yet are given, and places go on."""
    calls: list[list[Any]] = []
    made, one = model(calls), sequence([1, 2, 3], [6, 7, 8], [5, 2])
    plan: Plan | None = None
    for place in range(3):
        plan = Plan([Scheduled(one, 2 + place, 1)], tokens=1, behind=plan)
        made.run(plan, [0])
    assert [call[0] for call in calls] == [[3], [6], [7]]
    assert [call[1] for call in calls] == [[2], [3], [4]]
    assert [call[6] for call in calls] == [[22], [23], [8]]
    plan = Plan([Scheduled(one, 5, 1)], tokens=1, behind=plan)
    made.run(plan, [0], np.array([40]))
    assert (calls[-1][0], calls[-1][1], calls[-1][5], calls[-1][6]) == ([40], [5], [6], [9])


def test_tokens_that_the_model_does_not_know() -> None:
    calls: list[list[Any]] = []
    model(calls, vocabulary=3).run(Plan([Scheduled(sequence([1, 2, 3, 4], [], [0]), 0, 4)], tokens=4), [3])
    assert calls[0][0] == [1, 2, 0, 0]


def test_positions_of_several_rows() -> None:
    """Pages follow the tokens' places, whatever their positions are."""
    calls: list[list[Any]] = []
    made, one, two = model(calls, position_rows=3), sequence([1, 2, 3, 4, 5, 6], [], [9, 3]), sequence([7, 8], [], [4])
    one.embeddings = Embeddings([], 4, np.array([[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]))
    plan = Plan([Scheduled(one, 3, 3), Scheduled(two, 1, 1)], tokens=4)
    made.run(plan, [2, 3])
    assert calls[0][1] == [[0, 2, 3, 1], [1, 2, 3, 1], [1, 2, 3, 1]]
    assert calls[0][6] == [39, 12, 13, 17]
    # A step behind, whose tokens are not known yet.
    decoding = Plan([Scheduled(one, 6, 1), Scheduled(two, 2, 1)], tokens=2, behind=plan)
    made.run(decoding, [0, 1], np.array([40, 41]))
    behind = Plan([Scheduled(one, 7, 1), Scheduled(two, 3, 1)], tokens=2, behind=decoding)
    made.run(behind, [0, 1], np.array([42, 43]))
    assert [call[1] for call in calls[1:]] == [[[4, 2]] * 3, [[5, 3]] * 3]
    assert [call[6] for call in calls[1:]] == [[14, 18], [15, 19]]


def test_tokens_that_the_gpu_chooses() -> None:
    """As many as the step behind takes: a graph has padding, a step with adapters has none."""
    chosen: list[int] = []

    def choose(logits: Any, *draws: np.ndarray) -> Any:
        assert logits.shape == (3, 4)
        chosen.append(len(draws[0]))
        return SimpleNamespace(copy_to_host_async=lambda: None)

    def method(*given: Any) -> Any:
        return zeros((3, 4), "float32")

    adapter: Any = Adapter("a", 4, np.zeros((8, 16), np.float32), b"")
    loras: Any = SimpleNamespace(now=LorasNow(object(), weakref.WeakKeyDictionary({adapter: (0, 16)})))
    methods: Any = [(16, method)]
    draws = Draws(np.arange(3), *np.zeros((5, 3), np.float32))
    made = PagedModel(
        methods, [], DeviceMethods(4, choose), [4], 0, object(), graph_sizes=[8], adapted=methods, loras=loras
    )  # type: ignore[arg-type]
    for lora in (None, adapter):
        sequences = [sequence([1, 2], [], [i]) for i in range(3)]
        sequences[1].lora = lora
        plan = Plan([Scheduled(one, 0, 2) for one in sequences], tokens=6)
        made.run(plan, [1, 3, 5]).choose(draws)
    assert chosen == [8, 3]
