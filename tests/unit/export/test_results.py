"""Results that torch.export refuses: dataclasses, classes that others registered, caches, constants."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.results import Fields
from untorch.export.signature import describe_outputs
from untorch.export.tracing import export_program

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")


@dataclasses.dataclass
class Inner:
    score: torch.Tensor
    note: str = "mean"


@dataclasses.dataclass
class Outer:
    logits: torch.Tensor
    inner: Inner
    missing: torch.Tensor | None = None
    pair: Any = None


Pair = collections.namedtuple("Pair", "a b")


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def names(make: Any) -> list[Any]:
    program = export_program(Method("f", Model(make), (torch.ones(2, 3),)), False).program
    return [entry and (entry["name"], entry.get("constant", "array")) for entry in describe_outputs(program)]


def test_dataclasses_become_fields() -> None:
    assert names(lambda x: Outer(x + 1, Inner(x.sum()), pair=Pair(x * 2, Inner(x * 3, "other")))) == [
        ("logits", "array"), ("inner['score']", "array"), ("inner['note']", "mean"), None, ("pair.a", "array"),
        ("pair.b['score']", "array"), ("pair.b['note']", "other"),
    ]  # fmt: skip
    assert names(lambda x: [Inner(x + 1)]) == [("output_0['score']", "array"), ("output_0['note']", "mean")]


def test_a_class_that_others_registered_needs_no_paths() -> None:
    class Output(collections.OrderedDict):  # type: ignore[type-arg]
        pass

    pytree.register_pytree_node(
        Output, pytree._dict_flatten, lambda values, keys: Output(zip(keys, values, strict=True)),
        serialized_type_name="tests.Output",
    )  # fmt: skip
    assert names(lambda x: Output(sample=x + 1, other=[x * 2])) == [("sample", "array"), ("other[0]", "array")]


def test_constants_are_no_outputs_of_the_graph() -> None:
    traced = export_program(Method("f", Model(lambda x: {"y": x + 1, "n": 3, "flag": True}), (torch.ones(2),)), False)
    values = traced.module.graph.output_node().args[0]
    assert [isinstance(value, torch.fx.Node) for value in values] == [True, False, False]  # type: ignore[union-attr]
    assert traced.module(torch.ones(2))["n"] is None


def test_the_hook_is_removed() -> None:
    model = Model(lambda x: Inner(x + 1))
    export_program(Method("f", model, (torch.ones(2),)), False)
    assert isinstance(model(torch.ones(2)), Inner)
    assert pytree.tree_leaves(Fields(a=1, b=[2])) == [1, 2]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def test_a_cache_is_left_out_or_refused() -> None:
    model, ids = gpt2(), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.warns(
        UserWarning, match=r"method 'f': the model returns a key-value cache \(DynamicCache\), which is no"
    ):
        traced = export_program(Method("f", model, (ids,)), False)
    described = [entry["name"] if entry else None for entry in describe_outputs(traced.program)]
    assert described == ["logits", None]
    with pytest.raises(
        CompileError, match=r"DynamicCache\), which is no tensor: export it with kwargs={'use_cache': Fa"
    ):
        export_program(Method("f", model, (), {"input_ids": ids, "use_cache": True}), False)
    export_program(Method("f", model, (), {"input_ids": ids, "use_cache": False}), False)
