"""Named tuples: how torch writes their specifications, and what a call gives back."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.return_types import all_return_types
from torch.utils import _pytree as pytree

import untorch
from untorch.export import export
from untorch.export.patches.specs import named_tuples

Pair = collections.namedtuple("Pair", "low high")


@pytest.mark.parametrize("value", [Pair(1, 2), torch.ones(2, 2).max(1)], ids=["namedtuple", "return_types"])
def test_torch_still_refuses_named_tuples(value: Any) -> None:
    with pytest.raises(NotImplementedError, match="serializ"):
        pytree.treespec_dumps(pytree.tree_structure(value))


@pytest.mark.parametrize("kind", all_return_types, ids=lambda kind: kind.__name__)
def test_every_result_of_torch_is_written_with_its_fields(kind: Any) -> None:
    before = dict(pytree.SUPPORTED_SERIALIZED_TYPES)
    with named_tuples():
        _, node = json.loads(pytree.treespec_dumps(pytree.tree_structure(kind(range(kind.n_fields)))))
    assert node["type"] == "collections.namedtuple"
    context = json.loads(node["context"])
    assert context["class_name"] == kind.__name__
    assert len(context["fields"]) == kind.n_fields
    result = kind(range(kind.n_fields))
    assert [getattr(result, name) for name in context["fields"]] == list(result)
    assert before == pytree.SUPPORTED_SERIALIZED_TYPES


class Extremes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"max": x.max(1), "sorted": x.sort(1), "pair": Pair(x.amin(1), x.topk(2))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_calls_give_named_tuples(tmp_path: Path) -> None:
    model, x = Extremes(), torch.randn(3, 4)
    export(model, (x,), tmp_path / "extremes.pt2", progress=False)
    with untorch.load(tmp_path / "extremes.pt2") as program:
        got, expected = program.forward(x.numpy()), model(x)
        names = [output.name for output in program.forward.outputs]
    assert names == [
        "max.values", "max.indices", "sorted.values", "sorted.indices", "pair.low", "pair.high.values",
        "pair.high.indices",
    ]  # fmt: skip
    assert type(got["pair"]).__name__ == "Pair"
    for mine, eager in (
        (got["max"], expected["max"]), (got["sorted"], expected["sorted"]), (got["pair"].high, expected["pair"].high),
    ):  # fmt: skip
        assert type(mine).__name__ == type(eager).__name__
        assert mine._fields == ("values", "indices")
        numpy.testing.assert_array_equal(mine.values, eager.values)
        numpy.testing.assert_array_equal(mine.indices, eager.indices)
    numpy.testing.assert_array_equal(got["pair"].low, expected["pair"].low)
