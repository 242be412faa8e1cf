"""Trees of arguments: specifications as PyTorch writes them, flattening, rebuilding, and what is refused."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest

from untorch import InvalidArgumentError, InvalidFileError, UnsupportedError
from untorch._core import Tree
from untorch.runtime.pytree import Struct

LEAF = {"type": None, "context": None, "children_spec": []}


def node(kind: str, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(context), "children_spec": list(children)}


def spec(root: Any) -> Tree:
    return Tree(json.dumps([1, root]))


CASES = [
    (LEAF, 7),
    (node("builtins.tuple", None, LEAF, LEAF), (1, 2)),
    (node("builtins.list", None, LEAF, node("builtins.tuple", None)), [1, ()]),
    (node("builtins.dict", ["a", "b"], LEAF, LEAF), {"a": 1, "b": 2}),
    (node("builtins.dict", [], ), {}),
    (node("collections.OrderedDict", ["a"], LEAF), OrderedDict(a=1)),
    (node("collections.defaultdict", {"default_factory_name": "list", "dict_context": ["a"]}, LEAF), defaultdict(None, a=1)),
    (node("collections.deque", None, LEAF, LEAF), deque([1, 2])),
    (node("builtins.dict", ["x"], node("builtins.list", None, LEAF, LEAF)), {"x": [None, 3]}),
]  # fmt: skip


@pytest.mark.parametrize(("root", "value"), CASES)
def test_a_tree_survives_flatten_and_unflatten(root: Any, value: Any) -> None:
    tree = spec(root)
    leaves = [leaf for _, leaf in tree.flatten(value, "x")]
    assert len(leaves) == tree.num_leaves
    rebuilt = tree.unflatten(leaves)
    assert rebuilt == value
    assert type(rebuilt) is type(value)


def test_named_tuples_are_rebuilt_by_their_fields() -> None:
    tree = spec(node("collections.namedtuple", {"class_name": "m.Point", "fields": ["x", "y"]}, LEAF, LEAF))
    point = tree.unflatten([1, 2])
    assert (point.x, point.y) == (1, 2)
    assert type(point).__name__ == "Point"
    odd = spec(node("collections.namedtuple", {"class_name": "class", "fields": ["def", "y"]}, LEAF, LEAF))
    assert tuple(odd.unflatten([1, 2])) == (1, 2)


def test_classes_that_are_not_here_become_a_struct() -> None:
    tree = spec(node("transformers.Output", ["logits", "loss"], LEAF, LEAF))
    out = tree.unflatten([1, 2])
    assert isinstance(out, Struct)
    assert out["logits"] == out.logits == 1
    with pytest.raises(AttributeError, match="no field 'nope', there are: logits, loss"):
        _ = out.nope
    assert [leaf for _, leaf in tree.flatten(out, "x")] == [1, 2]
    assert spec(node("some.Class", None, LEAF)).unflatten([1]) == (1,)


def test_dataclasses_have_fields_that_are_none() -> None:
    """As torch.export.register_dataclass stores them: the fields with values, then those that are None."""
    tree = spec(node("m.Out", [["logits", "inner"], ["loss"]], LEAF, node("m.Empty", [[], ["a"]])))
    out = tree.unflatten([1])
    assert out == {"logits": 1, "inner": {"a": None}, "loss": None}
    assert isinstance(out.inner, Struct)
    assert out.loss is None
    assert [leaf for _, leaf in tree.flatten(out, "x")] == [1]
    assert [leaf for _, leaf in tree.flatten({"logits": 2, "inner": {}}, "x")] == [2]
    with pytest.raises(InvalidArgumentError, match="missing 'logits'; unknown 'other'"):
        tree.flatten({"inner": {}, "other": 1}, "x")


def test_paths_name_the_leaves() -> None:
    tree = spec(node("builtins.dict", ["a"], node("builtins.list", None, LEAF, LEAF)))
    assert [path for path, _ in tree.flatten({"a": [1, 2]}, "args[0]")] == ["args[0]['a'][0]", "args[0]['a'][1]"]


@pytest.mark.parametrize(
    ("root", "value", "text"),
    [
        (CASES[1][0], [1, 2], "x: expected a tuple of 2, got list"),
        (CASES[1][0], (1,), "x: expected a tuple of 2, got tuple of 1"),
        (CASES[1][0], 5, "x: expected a tuple of 2, got int"),
        (CASES[3][0], {"a": 1}, "x: expected a dict with 'a', 'b'; missing 'b'"),
        (CASES[3][0], {"a": 1, "b": 2, "c": 3}, "x: expected a dict with 'a', 'b'; unknown 'c'"),
        (CASES[3][0], [1, 2], "x: expected a dict with 'a', 'b', got list"),
        (CASES[4][0], [], "x: expected a dict with no keys, got list"),
    ],
)
def test_values_of_another_form_are_refused(root: Any, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        spec(root).flatten(value, "x")
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "[]", "[1]", "[1, 2, 3]", "[1, 5]", "[1, null]", "[1, {}]", '[1, {"children_spec": 3}]',
        '[1, {"type": ["a"], "context": null, "children_spec": []}]',
        '[1, {"type": null, "children_spec": [{"type": null, "children_spec": []}]}]',
        '[1, {"type": "builtins.dict", "context": "[\\"a\\"]", "children_spec": []}]',
        '[1, {"type": "collections.defaultdict", "context": "{\\"dict_context\\": 5}", "children_spec": [{"type": null, "children_spec": []}]}]',
        "[1, " + '{"type": "builtins.list", "children_spec": [' * 100 + "]}" * 100 + "]",
        "[1, " + "[" * 100000,
    ],
)  # fmt: skip
def test_damaged_specifications_are_refused(text: str) -> None:
    with pytest.raises(InvalidFileError, match="the package's call specification is damaged"):
        Tree(text)


def test_a_newer_protocol_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="call specification of protocol 2; this untorch reads 1"):
        Tree(json.dumps([2, LEAF]))
