"""How ``untorch.pipeline`` and pipelines are called: what is refused, misspelt options, iterators of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import untorch
from untorch.pipeline.base import Pipeline
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (("text-classification", "m.pt2"), {},
         """expected the package alone, as its task is in it: untorch.pipeline("m.pt2"); got 'text-classification', """
         "'m.pt2'"),
        (("text-classification",), {"model": Path("a/m.pt2")},
         """expected the package alone, as its task is in it: untorch.pipeline("a/m.pt2"); got 'text-classification', """
         f"model={Path('a/m.pt2')!r}"),
        (("m.pt2",), {"task": "fill-mask"},
         """expected the package alone, as its task is in it: untorch.pipeline("m.pt2"); got 'm.pt2', task='fill-mask'"""),
        ((), {}, """expected the path of a package, or a loaded program: untorch.pipeline("model.pt2")"""),
        (("m.pt2",), {"num_thread": 1},
         "unknown option 'num_thread': did you mean 'num_threads'?"),
        (("m.pt2",), {"top_k": 1},
         "unknown option 'top_k': known are device, num_runners, num_threads, trust; options of a call go to the "
         """pipeline: untorch.pipeline("m.pt2")(…, top_k=…)"""),
    ],
)  # fmt: skip
def test_wrong_calls_say_how_it_is_called(source: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        untorch.pipeline(*source, **options)
    assert str(caught.value) == f"pipeline: {text}"


def test_a_file_that_is_missing() -> None:
    with pytest.raises(FileNotFoundError):
        untorch.pipeline("text-classification")


class Doubles(Pipeline):
    """A result is twice the input; a list's is marked."""

    options = ("top_k", "truncation")

    def __init__(self) -> None:
        self.task = "text-classification"
        self.batches: list[int] = []

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        self.batches.append(len(inputs))
        return [(2 * one, is_list) for one in inputs]


def test_misspelt_options() -> None:
    text = (
        "pipeline: unknown option 'topk'; did you mean 'top_k'? text-classification takes batch_size, top_k, truncation"
    )
    with pytest.raises(ArgumentTypeError) as caught:
        Doubles()("a", topk=1)
    assert str(caught.value) == text
    with pytest.raises(
        ArgumentTypeError, match="unknown option 'x': text-classification takes batch_size, top_k, trunc"
    ):
        Doubles()("a", x=1)


def test_iterators_are_read_a_batch_at_a_time() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for i in range(7):
            taken.append(i)
            yield i

    pipeline = Doubles()
    results = pipeline(numbers(), batch_size=3)
    assert taken == pipeline.batches == []
    assert next(results) == (0, True)
    assert taken == [0, 1, 2]
    assert [one for one, _ in results] == [2, 4, 6, 8, 10, 12]
    assert pipeline.batches == [3, 3, 1]
    assert list(pipeline(map(str, range(2)))) == [("00", True), ("11", True)]
    with pytest.raises(InvalidArgumentError, match="batch_size: expected a positive integer, got 0"):
        pipeline(iter([1]), batch_size=0)
    assert pipeline(3) == (6, False)
    assert pipeline((3,)) == [(6, True)]
